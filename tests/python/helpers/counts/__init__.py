"""Operators that a reader finds in the source of model families, and those of their plans."""
