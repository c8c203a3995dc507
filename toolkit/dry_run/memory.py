"""How much memory this machine has left, and how much a process that simulates a rank takes."""

from __future__ import annotations

from pathlib import Path

from mindllm.config import RunConfig
from toolkit.dry_run.reduced import micro_batches_of
from toolkit.dry_run.stages import stages_of

MIB = 1 << 20
# Measured with MindSpore 2.10 on Llama 2 of several widths: of the two processes of a worker, of a layer that is compiled, of a
# layer that is scheduled for a micro-batch. Widths hardly matter, since no weight is made.
PROCESSES, LAYER, SCHEDULED_LAYER = 1150 * MIB, 12 * MIB, 4 * MIB


def worker_bytes(config: RunConfig) -> int:
    """Memory a worker takes at most, estimated from the number of operators it compiles and schedules."""
    chunks = config.parallel_config.pipeline_stage * config.model.config.pp_interleave_num  # other stages: a layer each
    on_stage = max(stage.layers for stage in stages_of(config))
    return PROCESSES + (chunks + on_stage) * LAYER + on_stage * micro_batches_of(config) * SCHEDULED_LAYER


def available_bytes() -> int:
    """Memory that can be taken without swapping, by the machine's count and by that of the control group."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    facts = dict(line.split(":", 1) for line in lines)
    machine = int(facts["MemAvailable"].split()[0]) << 10
    return min(machine, _left_in_control_group() or machine)


def _left_in_control_group(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What is left of a container's limit (cgroup v2), pages of files counted as free; None without a limit."""
    try:
        limit = (root / "memory.max").read_text(encoding="ascii").strip()
        statistics = dict(line.split() for line in (root / "memory.stat").read_text(encoding="ascii").splitlines())
        used = int((root / "memory.current").read_text(encoding="ascii"))
    except OSError:
        return None
    return None if limit == "max" else int(limit) - used + int(statistics.get("inactive_file", 0))
