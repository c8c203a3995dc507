"""Composes what this library can find out about a run into one verdict: ten questions, each with its answer and evidence."""
