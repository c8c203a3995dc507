"""What comes after ``mindllm finetune`` and ``mindllm pretrain``, as commands; and how several devices are started."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from mindllm.process.interrupts import INTERRUPTED

if TYPE_CHECKING:
    from mindllm.config import RunConfig

STARTED = "MS_WORKER_NUM"  # by a launcher, in the environment of its processes


def launch_line(config: RunConfig, verb: str) -> str:
    """Return the command that starts a process for each device; empty where there is one, or a launcher has started this."""
    devices = config.parallel_config.device_num
    if devices == 1 or config.context.device_target == "CPU" or STARTED in os.environ:
        return ""
    words = shlex.quote(f"{verb} --config {shlex.quote(str(config.source))}")
    return f"{devices} devices, each with a process of its own: mindllm launch --workers {devices} {words}"


def afterwards(config: RunConfig, verb: str, code: int) -> Iterator[str]:
    """Yield what to do with a run that has ended with an exit code: nothing where it has left no checkpoint."""
    from mindllm.train.checkpoint import CheckpointStore
    from mindllm.train.job.output_directory import CHECKPOINTS

    output = Path(config.output_dir)
    newest = CheckpointStore(output / CHECKPOINTS).newest()
    if newest is None or code not in (0, INTERRUPTED):
        return
    run, last = shlex.quote(_shown(output)), shlex.quote(_shown(newest))
    if code == INTERRUPTED:
        if config.source is not None:
            yield f"go on: mindllm {verb} --config {shlex.quote(_shown(config.source))} --resume_training"
        return
    yield f"talk to it: mindllm chat {run}" if verb == "finetune" else f'try it: mindllm generate {run} --prompt "…"'
    pet = config.model.config.pet_config
    if pet is None or pet.tuner.of_all_weights:
        yield f"as a Hugging Face directory: mindllm weights export {last} DIR"
        return
    if pet.tuner.low_rank or pet.tuner.own_format:
        yield f"the adapter as files{' of PEFT' * pet.tuner.low_rank}: mindllm weights adapter {last} DIR"
    if not pet.tuner.own_format:
        yield f"with its base as a Hugging Face directory: mindllm weights merge {last} DIR"


def _shown(path: Path) -> str:
    """A path below the working directory as it is typed there."""
    whole, here = path.resolve(), Path.cwd()
    return str(whole.relative_to(here)) if whole.is_relative_to(here) else str(whole)
