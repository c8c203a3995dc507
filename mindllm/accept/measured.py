"""A run that is executed, and what is read of it: losses, seconds, memory, and on devices what was profiled.

Runs of several replicas are as many processes, which the launchers of all nodes start; where devices share the model, a CPU of
node 0 executes all ranks in one process. No device was at hand: what ``msrun`` starts here, and what is read of it, was never run
on one.
"""

from __future__ import annotations

import math
import shlex
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mindllm.accept.nodes import Nodes
from mindllm.command import INTERRUPTED
from mindllm.config import RunConfig, render_config
from mindllm.files import atomic_open
from mindllm.launch.job import JobFailed
from mindllm.launch.script import command_of
from mindllm.launch.start import Launch
from mindllm.profiles.compare import Comparison
from mindllm.profiles.run import explain_profile
from mindllm.run.outcome import train_in_child
from mindllm.timing.device import Device
from mindllm.train.job.execution import is_sharded
from mindllm.train.metrics_file import METRICS_NAME, read_metrics

TIMEOUT = 1800  # seconds in which processes find each other
KEPT = ("step", "loss", "global_norm", "tokens", "overflow", "step_time_s", "data_wait_s", "used_peak_bytes")
"""Keys of ``metrics.jsonl`` that leave the machine: numbers, no names."""


@dataclass(frozen=True)
class Measured:
    """What a run has come to.

    Attributes:
        records: of every step, the keys of :data:`KEPT`.
        seconds: of a step, the median of those that neither compile nor are profiled; None: there is none.
        peak: bytes of device memory of the first rank; None on a CPU.
    """

    records: tuple[Mapping[str, Any], ...]
    seconds: float | None
    peak: int | None

    @property
    def losses(self) -> dict[int, float | None]:
        """The loss of every step, in nats per token; None where it was not finite."""
        return {record["step"]: record["loss"] for record in self.records}


def execute(config: RunConfig, nodes: Nodes | None = None) -> Measured:
    """Train a run in processes of its own, over what an earlier one has left in its directory.

    Args:
        config: the run.
        nodes: that share its devices evenly; None: this one has all of them.

    Raises:
        UserError, RunFailed: it did not run to its end.
        KeyboardInterrupt: it was asked to stop, and all its processes have.
    """
    devices, target = config.parallel_config.device_num, config.context.device_target
    if devices > 1 and (target == "Ascend" or not is_sharded(config)):
        _launch(config, devices, nodes or Nodes(alone(Path(config.output_dir), target == "Ascend")))
    else:
        train_in_child(config)
    found, last = measured(config), config.runner_config.stop_step or config.runner_config.train_steps or 0
    if found.records and found.records[-1]["step"] < last:  # SIGTERM, of which a launcher says that all is well
        raise KeyboardInterrupt
    return found


def measured(config: RunConfig) -> Measured:
    """Read what a run has left."""
    first = config.profile_start_step if config.profile else math.inf
    records = read_metrics(Path(config.output_dir) / METRICS_NAME)
    begun = records[0]["step"] if records else 0
    clean = [record["step_time_s"] for record in records if begun < record["step"] < first]
    peaks = [record["used_peak_bytes"] for record in records if record.get("used_peak_bytes")]
    kept = tuple({key: record[key] for key in KEPT if key in record} for record in records)
    return Measured(kept, statistics.median(clean) if clean else None, max(peaks, default=None))


def alone(output: Path, msrun: bool) -> Launch:
    """Return how a node finds others where there are none."""
    return Launch((), 1, 1, output, output, msrun=msrun)


def job_of(output: Path, place: Launch, workers: int, local: int) -> Launch:
    """Return what a node starts of a run whose YAML lies beside its directory ``output``, where all nodes see both."""
    number = f"_{place.node_rank}" if place.node_rank else ""
    return replace(
        place,
        command=tuple(command_of(shlex.join(["train", "--config", str(yaml_of(output))]))),
        workers=workers,
        local_workers=local,
        log_dir=output / f"launch{number}",
        shared_dir=output / "launch",
        timeout=TIMEOUT,
        msrun_log=output / f"msrun{number}.log",
    )


def yaml_of(output: Path) -> Path:
    """Return where the YAML of a run lies whose directory this is."""
    return output.with_suffix(".yaml")


def _launch(config: RunConfig, devices: int, nodes: Nodes) -> None:
    output = Path(config.output_dir)
    with atomic_open(yaml_of(output)) as file:
        file.write(render_config(config))
    wanted = job_of(output, nodes.place, devices, devices // nodes.count)
    wanted.shared_dir.mkdir(parents=True, exist_ok=True)
    try:
        code = nodes.run(output.name, wanted)
    except JobFailed as failure:
        if failure.exit_code in (INTERRUPTED, 128 + 15):
            raise KeyboardInterrupt from failure
        raise
    if code == INTERRUPTED:
        raise KeyboardInterrupt


def recorded(config: RunConfig, device: Device) -> Comparison | None:
    """Return the profiled step beside its prediction; None: none was recorded.

    Raises:
        UserError: its files are of another form than is known here.
    """
    directory = Path(config.output_dir) / "profile"
    return explain_profile(config, directory, device).comparison if config.profile and directory.is_dir() else None


def computing_of(comparison: Comparison) -> float:
    """Return the seconds of a step in which the slowest recorded rank of the first recorded stage computes."""
    return max(record.parts.computing for record in comparison.stages[0].records)


def reached(comparison: Comparison, key: tuple[str, str], described: float) -> float | None:
    """Return the bandwidth of an exchange, in bytes a second; None: it was not recorded.

    One exchange of the recording stands for one of the prediction, so the ratio of their seconds is that of their bandwidths.
    """
    for stage in comparison.stages:
        name = ("exchange", key)
        if name not in stage.keys:
            continue
        detail = stage.term(name).detail  # type: ignore[arg-type]
        work = next((one["work", key] for one in stage.terms if ("work", key) in one), None)  # type: ignore[index]
        more = float(work.detail["runs"]) / float(work.detail["predicted_runs"] or 1) if work else 1.0  # type: ignore[arg-type]
        spent, predicted = float(detail["measured"]), float(detail["predicted"])  # type: ignore[arg-type]
        if spent > 0 and predicted > 0:
            return described * predicted * more / spent
    return None
