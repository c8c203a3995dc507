"""Finds the parallel strategy of a run on a number of devices: enumerated, pruned, predicted, planned, and held to a dry run."""
