"""Shared by the tests: models, comparisons with PyTorch, tables of cases, client processes."""
