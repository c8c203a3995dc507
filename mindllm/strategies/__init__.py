"""Search for the parallel strategy of a run: enumerate, prune, predict, plan, and validate by a dry run."""
