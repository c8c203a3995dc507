"""What a worker of the dry run is asked for: a rank to simulate, to estimate, or to find the source lines of."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mindllm.config import RunConfig
from mindllm.dry_run.cache import kept_file

SIMULATE, ESTIMATE, LINES = "simulate", "estimate", "lines"


@dataclass(frozen=True)
class Request:
    """A rank to simulate, to estimate, or to find the source lines of. ``name`` says what it is about, for people."""

    config: RunConfig
    rank: int
    name: str
    what: str = SIMULATE

    @property
    def kept(self) -> Path:
        return kept_file(self.config, self.rank, f".{self.what}")
