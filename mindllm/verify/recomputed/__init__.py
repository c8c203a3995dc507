"""What holds the single device itself: its loss, gradients and update once more, from what its step has kept."""
