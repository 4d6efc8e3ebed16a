"""The memory of tensors: shared, watched, given back."""
