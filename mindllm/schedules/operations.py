"""The kinds of operations of a pipeline stage."""

from __future__ import annotations

FORWARD, BACKWARD, WEIGHT, INPUT = 0, 1, 2, 3
"""A forward pass; a backward pass; in two operations: the gradients of weights, and before them those of what came in."""
KINDS = 4
NAMES = ("forward", "backward", "weight gradient", "input gradient")
"""By kind."""
LETTERS = "FBWI"
"""As PyTorch's schedules write them."""
Operation = tuple[int, int, int]  # what, chunk, micro-batch
