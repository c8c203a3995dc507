"""How far an evaluation is: a callback that is told of every answer, or a line a minute in the log of a training run."""

from __future__ import annotations

import logging
import time
from datetime import timedelta

NAMES = {"loglikelihood": "scoring", "generate_until": "writing"}  # what a kind of request has the model do
SECONDS_BETWEEN_LINES = 60.0
logger = logging.getLogger(__name__)


class LoggedProgress:
    """Says in the log how many requests are answered and how long the others take, at most once a minute.

    Time counts from the first answer on, before which graphs are compiled.
    """

    def __init__(self) -> None:
        self.first = self.said = 0.0

    def __call__(self, what: str, done: int = 0, total: int | None = None) -> None:
        """Take note that ``done`` of ``total`` are answered."""
        now = time.monotonic()
        if done <= 1:
            self.first = self.said = now
        if total is None or now - self.said < SECONDS_BETWEEN_LINES:
            return
        self.said = now
        left = timedelta(seconds=round((now - self.first) / (done - 1) * (total - done)))
        logger.info("%s: %d of %d answers, about %s left", what, done, total, left)
