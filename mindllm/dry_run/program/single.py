"""The same program on one device, kept beside its ranks, so that all ranks can be held against it without a second command.

It is run as a rank of its own, told that it is alone: strategies, stages and sharded optimizers are dropped, and the step is
given the rows that all devices have together. Where that cannot be, a line says why, and is kept as well.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mindllm.compiled.execute.state import whole_shape
from mindllm.compiled.foreign.kept_program import NOT_ALONE, SINGLE, KeptRank, kept_ranks
from mindllm.compiled.foreign.lockstep import ProgramRank, batch_of, read_rank
from mindllm.dry_run.program.running import Subject, run_ranks
from mindllm.errors import RunFailed, UserError
from mindllm.files import atomic_open
from mindllm.terminal.progress import Progress, unwatched

LARGEST = 1 << 28  # weights, in elements, of a program whose ranks can be executed on a machine like this one


def run_single(subject: Subject, keep: Path, stages: int, progress: Progress = unwatched) -> str:
    """Runs the program on one device and keeps it; returns why there is none, or an empty string."""
    directory = keep / SINGLE
    shutil.rmtree(directory, ignore_errors=True)
    try:
        ranks = kept_ranks(keep)
        first = read_rank(ranks[0])
        _refuse_too_large(first)
        batch = batch_of(first, max(1, len(ranks) // stages))

        def told(what: str, done: int = 0, total: int | None = None) -> None:
            progress(f"one device: {what}", done, total)

        run_ranks(replace(subject, devices=1, batch=batch), 0, lambda report: [0], directory, 1, told)
        _require_batch(read_rank(KeptRank(0, directory / "rank_0")), batch)
    except (UserError, RunFailed) as error:
        reason = str(error).replace("\n", " ")
        shutil.rmtree(directory / "rank_0", ignore_errors=True)
        directory.mkdir(parents=True, exist_ok=True)
        with atomic_open(directory / NOT_ALONE) as file:
            file.write(reason)
        return reason
    return ""


def _refuse_too_large(rank: ProgramRank) -> None:
    """Raises UserError where the weights of the whole program are too many to be computed with here."""
    elements = sum(math.prod(whole_shape(parameter)) for parameter in rank.graph.parameters.values())
    if elements > LARGEST:
        raise UserError(
            f"rank {rank.graph.rank} alone knows parameters of {elements:,} elements, and up to {LARGEST:,} can be executed "
            "here; give the program fewer layers of smaller widths"
        )


def _require_batch(alone: ProgramRank, batch: Sequence[Sequence[int]]) -> None:
    """Raises UserError where the step on one device does not read the rows that all devices have together."""
    read = batch_of(alone, 1)
    if read != batch:
        raise UserError(
            f"its step on one device reads a batch of {_shapes(read)}, all devices together one of {_shapes(batch)}, and rows "
            "could not be added"
        )


def _shapes(batch: Sequence[Sequence[int]]) -> str:
    return ", ".join(str(list(shape)) for shape in batch)
