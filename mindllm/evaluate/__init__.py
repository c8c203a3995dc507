"""Evaluation on public tasks: lm-evaluation-harness asks, the static-cache graphs answer."""
