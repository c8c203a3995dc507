"""Small runs for the tests of the configuration."""

from run_fixtures import load, minimal, refused, small_run, write  # noqa: F401
