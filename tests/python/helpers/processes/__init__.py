"""Trainers in processes of their own; tests start them with `python -m`."""
