"""The self-check: a call computed by the daemon and by PyTorch, and how far they may differ."""
