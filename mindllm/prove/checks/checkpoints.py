"""How large checkpoints are, and whether there is room where they go."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from mindllm.config import RunConfig
from mindllm.config.callbacks import CheckpointMonitorConfig
from mindllm.prove.answers import Answer, Finding, Standing
from mindllm.prove.questions import CHECKPOINTS
from mindllm.train.checkpoint.store import checkpoint_bytes, max_checkpoints
from mindllm.units import GB, file_size


def answered(config: RunConfig) -> Answer:
    """Return sizes, room, and what is wrong with them."""
    size, kept = checkpoint_bytes(config), max_checkpoints(config)
    if not any(isinstance(item, CheckpointMonitorConfig) for item in config.callbacks):
        reason = Finding("no checkpoint is saved before the end", "add a CheckpointMonitor to callbacks", "callbacks")
        return Answer(CHECKPOINTS, Standing.REFUTED, "a run that ends early is lost", (reason,))
    needed, directory = size * (kept + 1), _existing(Path(config.output_dir))
    free = shutil.disk_usage(directory).free
    says = f"{file_size(size)} a checkpoint, {kept} kept: {file_size(needed)} while one is written"
    figures = {"checkpoint": size, "kept": kept, "needed": needed, "free": free}
    if config.context.device_target == "Ascend":
        evidence = (f"room in {config.output_dir}: asked on the node (here: {free / GB:,.1f} GB free)",)
        return Answer(CHECKPOINTS, Standing.PROVED, says, (), evidence, figures=figures)
    if free < needed:
        missing = f"{directory} has {free / GB:,.1f} GB free, {(needed - free) / GB:,.1f} GB less than that"
        reason = Finding(missing, "lower keep_checkpoint_max, or give another output_dir", "output_dir")
        return Answer(CHECKPOINTS, Standing.REFUTED, says, (reason,), figures=figures)
    return Answer(CHECKPOINTS, Standing.PROVED, says, figures=figures)


def with_sizes(config: RunConfig, resumed: Answer) -> Answer:
    """Return what is known of a resume together with sizes and room, which are those of today."""
    sizes = answered(config)
    standing = sizes.standing if sizes.standing is Standing.REFUTED else resumed.standing
    return replace(
        resumed,
        standing=standing,
        says=f"{sizes.says}; {resumed.says}",
        findings=(*sizes.findings, *resumed.findings),
        evidence=(*sizes.evidence, *resumed.evidence),
        figures=sizes.figures,
    )


def _existing(path: Path) -> Path:
    """The directory, or the nearest one above it that exists."""
    path = path.absolute()
    return next(place for place in (path, *path.parents) if place.is_dir())
