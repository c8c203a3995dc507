"""Evaluates a model on the tasks that people report."""
