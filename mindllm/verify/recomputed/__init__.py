"""Recompute the single device's loss, gradients and update in float64, from values recorded in its step."""
