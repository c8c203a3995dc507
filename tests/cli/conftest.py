"""Fixtures of runs for the command lines."""

from run_fixtures import write  # noqa: F401
