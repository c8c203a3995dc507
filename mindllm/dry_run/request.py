"""Requests to a worker of the dry run: simulate a rank, or list the source lines of its operators."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mindllm.config import RunConfig
from mindllm.dry_run.cache import kept_file

SIMULATE, LINES = "simulate", "lines"


@dataclass(frozen=True)
class Request:
    """A rank to simulate, or to list the source lines of. ``name`` describes it in progress and errors."""

    config: RunConfig
    rank: int
    name: str
    what: str = SIMULATE

    @property
    def kept(self) -> Path:
        return kept_file(self.config, self.rank, f".{self.what}")
