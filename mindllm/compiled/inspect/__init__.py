"""Looks into a compiled graph: what it computes, what it sends and why, what recomputation it really does."""
