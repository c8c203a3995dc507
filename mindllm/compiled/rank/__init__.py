"""Ranks compiled by MindSpore in processes of their own: one, or many at a time."""
