"""All ranks of a cluster as an engine: real training of a small model on many devices that are not there.

The graphs are those MindSpore's parallel compiler makes for every rank; they are executed in lock-step in this process.

It evaluates by the forward graphs of all ranks, with the weights that training has. Where a number is not finite, the first such
one is found among all operators of all ranks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mindllm.architecture.optimizer_state import is_state
from mindllm.compiled.execute.cluster import Cluster, rows_of
from mindllm.compiled.execute.lockstep import Lockstep
from mindllm.compiled.execute.rank_interpreter import RankInterpreter
from mindllm.compiled.execute.state import ACCUMULATORS, initial_parts, put_parts
from mindllm.compiled.graph.compiled_graph import CompiledGraph, Node
from mindllm.compiled.rank.compile_ranks import RankCompilation, cache_directory
from mindllm.config import RunConfig
from mindllm.config.callbacks import LOGIT
from mindllm.errors import RunFailed
from mindllm.finetune.transform import initial_weights
from mindllm.parallel.context import input_columns
from mindllm.parallel.layout import mesh_of
from mindllm.terminal.progress import Progress, unwatched
from mindllm.train.checkpoint import Part, RankTensors
from mindllm.train.checkpoint.tensors import Converted, numpy_dtype
from mindllm.train.distributed_step import input_slices
from mindllm.train.engine import Batch, Engine, StepResult
from mindllm.train.engine.columns import with_document_columns
from mindllm.train.engine.engine import evaluation_config, weight_signatures
from mindllm.train.health import Watched, sums_by_weight
from mindllm.train.job.ranks import SINGLE_RANK
from mindllm.train.optimizers.spikes import limits_of_step
from mindllm.train.watched import column_names, summed_kinds

logger = logging.getLogger(__name__)


class LossCluster:
    """Ranks in one process that compute losses; arguments as those of :class:`Cluster`."""

    def __init__(
        self, graphs: Sequence[CompiledGraph], stages: int, slices: int, whole: Mapping[str, Any], last_stage: int
    ) -> None:
        self.stage_devices, self.last_stage = len(graphs) // stages, last_stage
        self.slices = slices
        self.machines = [RankInterpreter(graph, initial_parts(graph, whole)) for graph in graphs]

    def take_weights(self, cluster: Cluster) -> None:
        """Use the current weights of a training cluster with the same layout.

        Raises:
            RunFailed: the compiler has cut a weight otherwise for training.
        """
        for own, training in zip(self.machines, cluster.machines, strict=True):
            for name, parameter in own.parameters.items():
                if name not in training.parameters:
                    continue
                value = training.parameters[name].value
                if value.shape != parameter.value.shape:
                    raise RunFailed(
                        f"rank {own.rank}: {name} is {list(parameter.value.shape)} in the graph that evaluates and "
                        f"{list(value.shape)} in the one that trains"
                    )
                parameter.value = value

    def load_state(self, arrays: Mapping[str, Any]) -> None:
        """Replace every rank's parts of these whole tensors."""
        for machine in self.machines:
            put_parts(machine, arrays)

    def evaluate(self, batch: Mapping[str, np.ndarray]) -> tuple[float, int]:
        """Summed loss in nats and number of tokens of a batch ``[batch, seq]``.

        Raises:
            Deadlock: ranks that wait for each other.
        """
        inputs = {
            machine.rank: rows_of(batch, machine.rank, self.stage_devices, self.slices) for machine in self.machines
        }
        outputs = Lockstep(self.machines, inputs).run()
        with_loss = self.machines[self.last_stage * self.stage_devices].rank
        return float(outputs[with_loss]), int(batch["loss_mask"].sum())


class _Found(Exception):
    """Ends the execution at the operator that was looked for."""

    def __init__(self, where: str) -> None:
        super().__init__(where)
        self.where = where


def first_not_finite(cluster: Cluster, batch: Mapping[str, np.ndarray]) -> list[str]:
    """Execute a step again, without a loss scale, up to the first operator whose operands are finite and whose result is not.

    Empty where there is none. The step must be one that overflows: it leaves weights and state as they are, and stops here
    before its update.
    """

    def look(rank: int, node: Node, operands: tuple[Any, ...], result: Any) -> None:
        if not _is_finite(result) and all(map(_is_finite, operands)):
            raise _Found(f"{node.op} at {node.scope} on rank {rank}")

    for machine in cluster.machines:
        machine.observer = look
    try:
        cluster.step(batch, 0.0, 1.0)
    except _Found as found:
        return [found.where]
    finally:
        for machine in cluster.machines:
            machine.observer = None
    return []


def weights_not_finite(cluster: Cluster) -> list[str]:
    """Names of parameters that hold a NaN or an infinity on some rank, accumulators aside."""
    bad = {
        name: None
        for machine in cluster.machines
        for name, parameter in machine.parameters.items()
        if not name.startswith(ACCUMULATORS) and not _is_finite(parameter.value)
    }
    return list(bad)


def _is_finite(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_finite, value))
    if isinstance(value, np.ndarray | np.floating) and np.issubdtype(value.dtype, np.floating):
        return bool(np.isfinite(value).all())
    return True


class LockstepEngine(Engine):
    """Every rank of the run; this process reads whole batches and deals them out.

    Args:
        progress: told of ranks that are compiled.
        cache: where compiled graphs are kept by content.
    """

    def __init__(
        self,
        config: RunConfig,
        training: bool = True,
        progress: Progress = unwatched,
        cache: Path | None = None,
    ) -> None:
        super().__init__(config, SINGLE_RANK)
        self.parts = config.parallel_config.micro_batch_num * config.runner_config.gradient_accumulation_steps
        self._progress = progress
        self._cache = cache or cache_directory()
        self._columns = input_columns(config)
        self._stages = mesh_of(config).pipeline_stage
        self._cluster: Cluster | None = None
        self._evaluation: LossCluster | None = None
        if training:
            graphs = self._compile(config, training=True)
            limits = len(limits_of_step(config))
            slices, weights = input_slices(config), initial_weights(config)
            watches = bool(summed_kinds(config.monitor_config.watched()))
            groups = len(config.grouped_lr_schedule.grouped)
            self._cluster = Cluster(
                graphs,
                self._stages,
                slices,
                weights,
                limits=limits,
                watches=watches,
                groups=groups,
                last_stage=config.last_stage,
            )
        else:
            self._evaluation = self._loss_cluster()

    def _compile(self, config: RunConfig, training: bool) -> list[CompiledGraph]:
        begun = time.monotonic()
        what = "training" if training else "evaluation"
        with RankCompilation(config, self._cache, training=training) as compilation:
            total = compilation.devices
            logger.info("compiling the %s graphs of %d ranks, %d at a time", what, total, compilation.workers)
            graphs = compilation.graphs(lambda done: self._progress(f"compiling the {what} graphs", done, total))
        logger.info("compiled the %s graphs of %d ranks in %.1f s", what, total, time.monotonic() - begun)
        return graphs

    def _loss_cluster(self) -> LossCluster:
        """Create the cluster that evaluates. Its weights are set before use."""
        config = evaluation_config(self.config)
        graphs = self._compile(config, training=False)
        unknown = {
            name: np.broadcast_to(np.float32(0), shape) for name, (shape, _) in weight_signatures(config).items()
        }
        return LossCluster(graphs, self._stages, input_slices(config), unknown, config.last_stage)

    def step(
        self, batch: Batch, rate: float, scale: float, limits: Sequence[float] = (), group_rates: Sequence[float] = ()
    ) -> StepResult:
        assert self._cluster is not None
        columns, group_rates = with_document_columns(batch, self._columns), self.complete_group_rates(rate, group_rates)
        step = self._cluster.step(columns, rate, scale, limits=self.complete_limits(limits), group_rates=group_rates)
        return StepResult.of(step.loss, step.norms[0], not step.overflows[0], step.tokens[0])

    def evaluate(self, batch: Batch) -> tuple[float, int]:
        if self._evaluation is None:
            self._evaluation = self._loss_cluster()
        if self._cluster is not None:
            self._evaluation.take_weights(self._cluster)
        return self._evaluation.evaluate(with_document_columns(batch, self._columns))

    def not_finite(self, batch: Batch) -> list[str]:
        assert self._cluster is not None
        bad = weights_not_finite(self._cluster)
        return (
            [f"weight {name}" for name in bad]
            if bad
            else first_not_finite(self._cluster, with_document_columns(batch, self._columns))
        )

    def local_state(self) -> Mapping[int, RankTensors]:
        assert self._cluster is not None
        return {rank: self._in_run_types(held) for rank, held in self._cluster.local_state().items()}

    def _in_run_types(self, held: RankTensors) -> RankTensors:
        """Return what a rank keeps with weights in the types of the run; graphs of a CPU store float32."""
        weights = {
            name: replace(part, value=self._in_its_type(name, part.value)) if isinstance(part, Part) else part
            for name, part in held.weights.items()
        }
        return replace(held, weights=weights)

    def counts(self) -> Mapping[str, np.ndarray]:
        return {} if self._cluster is None else self._cluster.counts()

    def watched(self) -> Watched:
        figures = self.config.monitor_config.watched()
        if self._cluster is None or not figures or not self._cluster.returned:
            return {}
        found: dict[str, Mapping[str, float]] = {}
        if self._cluster.watches:
            names = column_names(self.config)
            found |= sums_by_weight(summed_kinds(figures), names, self._cluster.watched(names))
        if LOGIT in figures:
            found[LOGIT] = self._cluster.largest_logits()
        return found

    def load_state(self, arrays: Mapping[str, Any]) -> None:
        arrays = {name: self._in_its_type(name, item) for name, item in arrays.items()}
        for cluster in (self._cluster, self._evaluation):
            if cluster is not None:
                cluster.load_state(arrays)

    def _in_its_type(self, name: str, source: Any) -> Any:
        """Return a weight rounded to half precision where the run's parameter has it."""
        kind = self.config.model.config.parameter_type(name)
        is_wider = kind != "float32" and not is_state(name) and source.dtype.name == "float32"
        return Converted(name, source, numpy_dtype(kind)) if is_wider else source
