"""The processes that train one model together: which of them this is, and how they agree."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from mindllm.config import RunConfig
from mindllm.launch.meeting import Seat
from mindllm.train.leaving import tidy_up

LAUNCHER = 'bash scripts/msrun_launcher.sh "run_llm.py --config {source} ..." {devices}'


@dataclass(frozen=True)
class Ranks:
    """Rank ``rank`` of ``count``, and its seat where they meet. Every method is called by all ranks, in the same order."""

    rank: int = 0
    count: int = 1
    seat: Seat | None = None

    @property
    def is_first(self) -> bool:
        """Whether this is the one rank that writes what a run has once."""
        return self.rank == 0

    def sum(self, values: Sequence[float]) -> list[float]:
        """The sums over all ranks of as many values from each, in double precision; waits for the last one."""
        return list(values) if self.seat is None else self.seat.sum(values)

    def meet(self) -> None:
        """Waits for the last rank."""
        self.sum([])

    def agree(self, choice: str, choices: Sequence[str]) -> str:
        """The first of ``choices`` that any rank has chosen; empty where none has."""
        chosen = self.sum([float(choice == name) for name in choices])
        return next((name for name, count in zip(choices, chosen, strict=True) if count), "")


ALONE = Ranks()


def end_rank(code: int) -> None:
    """Ends the process of one of several ranks, tidied up, but without what native libraries do at the end.

    MindSpore's connections to other processes crash now and then (2.10) in its exit function, which clears its resources, or in
    destructors, when all is done and saved.
    """
    if Seat.is_inherited():
        tidy_up()
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def started_ranks(config: RunConfig) -> Ranks:
    """Who this process is among those a launcher has started; alone where there is no launcher.

    Raises:
        UserError: the configuration describes another number of devices than were started.
    """
    devices = config.parallel_config.device_num
    started = int(os.environ.get("MS_WORKER_NUM", "1"))
    seat = Seat.inherited()
    if started == devices == 1:
        return ALONE
    if started == 1 or seat is None:
        start = LAUNCHER.format(source=config.source, devices=devices)
        raise config.error(
            "parallel_config",
            f"describes {devices} devices, each of which needs a process; start them with\n  {start}\n"
            "or write use_parallel: false and sizes of 1",
        )
    if started != devices:
        raise config.error(
            "parallel_config",
            f"describes {devices} devices, but {started} processes were started; start {devices}, or write "
            f"use_parallel: true and data_parallel: {started}",
        )
    return Ranks(int(os.environ["RANK_ID"]), started, seat)
