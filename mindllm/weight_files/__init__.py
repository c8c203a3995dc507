"""Weights between Hugging Face directories and checkpoints, and what is in either."""
