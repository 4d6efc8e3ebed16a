"""Hugging Face trainers and those of other packages, with small models."""
