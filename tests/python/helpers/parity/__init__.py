"""Training through the daemon next to the same training in PyTorch."""
