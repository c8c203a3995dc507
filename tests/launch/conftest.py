"""Property tests have no deadline per example: on a busy machine it would fail at random."""

from hypothesis import settings

settings.register_profile("no_deadline", deadline=None)
settings.load_profile("no_deadline")
