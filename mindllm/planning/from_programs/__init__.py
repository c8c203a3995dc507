"""Costs of anybody's program, from simulated runs of it: shared out to layers and ends by least squares."""
