"""Runs made smaller: fewer layers with one of every kind, one stage, a smaller mesh, smaller sizes, fewer micro-batches."""
