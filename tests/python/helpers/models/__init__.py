"""Small models by family name, and random ones."""
