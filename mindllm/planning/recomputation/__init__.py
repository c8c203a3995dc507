"""What layers of a stage recompute: the mixes worth considering, and the one that fits a stage's memory."""
