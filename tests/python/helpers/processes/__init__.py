"""Client processes of tests: trainers, and the code of a page; most start by `python -m`."""
