"""Anybody's program: the environment of its ranks in a dry run, what was kept of them, and all of them in lockstep."""
