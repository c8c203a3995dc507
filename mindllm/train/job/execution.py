"""Choice of the engine that executes a run, and of this process's rank. Depends on the YAML and the environment only."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from mindllm.config import RunConfig
from mindllm.launch.meeting import RendezvousClient
from mindllm.train.job.ranks import SINGLE_RANK, CollectiveRendezvous, Ranks
from mindllm.units import counted

LAUNCHER = 'mindllm launch --workers {devices} "{mode} --config {source} ..."'
SIMULATION_LEVEL = "MS_SIMULATION_LEVEL"
DRY_RUN = "1"  # the host side runs completely; no kernel is launched


class Executor(Enum):
    """What computes the steps of a run."""

    REPLICA = "the whole model on this device"
    CLUSTER_RANK = "one rank of devices that share the model"
    LOCKSTEP = "all ranks, one after the other, on this CPU"


@dataclass(frozen=True)
class Execution:
    """The part of this process in a run."""

    executor: Executor
    ranks: Ranks = SINGLE_RANK

    @property
    def connects_first(self) -> bool:
        """True if ranks can exchange numbers only after MindSpore has connected them (not started by ``mindllm launch``)."""
        return isinstance(self.ranks.rendezvous, CollectiveRendezvous)


def execution_of(config: RunConfig, environment: Mapping[str, str] = os.environ) -> Execution:
    """Return the rank of this process and the engine it executes.

    Raises:
        UserError: the configuration describes another number of devices than were started, or an unsupported kind.
    """
    devices, target = config.parallel_config.device_num, config.context.device_target
    if is_simulation(environment):
        return _simulated(config, environment)
    started = int(environment.get("MS_WORKER_NUM", "1"))
    if started == devices == 1:
        return Execution(Executor.REPLICA)
    if started == 1:
        if target == "CPU":
            return Execution(Executor.LOCKSTEP)
        raise _not_started(config)
    if started != devices:
        raise config.error(
            "parallel_config",
            f"describes {counted(devices, 'device')}, but {started} processes were started; start {devices}, or write "
            f"use_parallel: true and data_parallel: {started}",
        )
    rank = int(environment["RANK_ID"])
    rendezvous = RendezvousClient.inherited()
    if target == "CPU":
        _require_replicas(config)
        return Execution(Executor.REPLICA, Ranks(rank, started, rendezvous))
    return Execution(Executor.CLUSTER_RANK, Ranks(rank, started, rendezvous or CollectiveRendezvous(started)))


def describe(config: RunConfig, execution: Execution) -> str:
    """Return a log line with the mesh and what executes it."""
    sizes = config.parallel_config
    mesh = sizes.sizes_text(of="name")
    if execution.executor is Executor.LOCKSTEP:
        return f"{mesh}: all {sizes.device_num} ranks run in lockstep in this process"
    simulated = ", in MindSpore's dry run (nothing is computed)" if execution.ranks.simulated else ""
    return f"{mesh}: rank {execution.ranks.rank} of {execution.ranks.count}{simulated}"


def is_simulation(environment: Mapping[str, str] = os.environ) -> bool:
    """Return True if MindSpore's dry run is requested by the environment."""
    return bool(environment.get(SIMULATION_LEVEL))


def is_sharded(config: RunConfig) -> bool:
    """Return True if each rank has only a part of the model or of the optimizer state."""
    sizes = config.parallel_config
    return sizes.device_num > sizes.data_parallel or (
        sizes.device_num > 1 and config.parallel.enable_parallel_optimizer
    )


def _simulated(config: RunConfig, environment: Mapping[str, str]) -> Execution:
    level, devices = environment[SIMULATION_LEVEL], config.parallel_config.device_num
    if level != DRY_RUN:
        raise config.error("context", f"{SIMULATION_LEVEL} {level} is not supported; set {SIMULATION_LEVEL}={DRY_RUN}")
    if config.context.device_target != "Ascend":
        target = config.context.device_target
        raise config.error("context.device_target", f"only Ascend devices are simulated (value {target}); write Ascend")
    size, rank = (
        _number(config, environment, name, default) for name, default in (("RANK_SIZE", "1"), ("RANK_ID", "0"))
    )
    if size != devices:
        raise config.error(
            "parallel_config",
            f"describes {counted(devices, 'device')}, but RANK_SIZE is {size}; set RANK_SIZE={devices}",
        )
    if rank >= devices:
        raise config.error("parallel_config", f"has ranks 0 to {devices - 1}, but RANK_ID is {rank}; set one of these")
    executor = Executor.CLUSTER_RANK if devices > 1 else Executor.REPLICA
    return Execution(executor, Ranks(rank, devices, simulated=True))


def _number(config: RunConfig, environment: Mapping[str, str], name: str, default: str) -> int:
    value = environment.get(name, default)
    if not value.isdecimal():
        raise config.error("parallel_config", f"{name} is {value!r} in the environment; set it to a number")
    return int(value)


def _not_started(config: RunConfig) -> Exception:
    devices = config.parallel_config.device_num
    start = LAUNCHER.format(source=config.source, devices=devices, mode=config.run_mode)
    return config.error(
        "parallel_config",
        f"describes {devices} Ascend devices, each of which needs a process; start them with\n  {start}\n"
        "or write context.device_target: CPU to execute all ranks together on this machine, or use_parallel: false and "
        f"sizes of 1; a dry run of one rank: {SIMULATION_LEVEL}={DRY_RUN} RANK_SIZE={devices} RANK_ID=0 mindllm "
        f"{config.run_mode} ...",
    )


def _require_replicas(config: RunConfig) -> None:
    """Raise if CPU processes would share the model: MindSpore's parallel compiler does not support the CPU target."""
    if is_sharded(config):
        sizes = config.parallel_config
        raise config.error(
            "parallel_config",
            f"shards the model (model_parallel {sizes.model_parallel}, pipeline_stage {sizes.pipeline_stage}, "
            f"enable_parallel_optimizer {str(config.parallel.enable_parallel_optimizer).lower()}), which processes on CPUs "
            "cannot; start it without the launcher: all ranks are then executed together in one process",
        )
