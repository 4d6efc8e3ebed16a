"""The self-check: compares a call in the daemon with PyTorch, and bounds the difference."""
