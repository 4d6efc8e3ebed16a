"""Memory that tensors lie in: shared, watched, given back."""
