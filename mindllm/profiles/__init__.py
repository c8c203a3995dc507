"""Recordings of profilers beside the predicted step: what they hold, and where the difference comes from."""
