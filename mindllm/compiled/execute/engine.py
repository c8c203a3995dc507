"""All ranks of a cluster as an engine: real training of a small model on many devices that are not there.

The graphs are those MindSpore's parallel compiler makes for every rank; they are executed in lock-step in this process.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mindllm.compiled.execute.cluster import Cluster
from mindllm.compiled.execute.first_not_finite import first_not_finite, weights_not_finite
from mindllm.compiled.execute.loss_cluster import LossCluster
from mindllm.compiled.graph.compiled_graph import CompiledGraph
from mindllm.compiled.rank.compile_ranks import RankCompilation, cache_directory
from mindllm.config import RunConfig
from mindllm.finetune.initial_weights import initial_weights
from mindllm.parallel.context import input_columns
from mindllm.parallel.layout import mesh_of
from mindllm.train.checkpoint import RankTensors
from mindllm.train.distributed_step import input_slices
from mindllm.train.engine import Batch, Engine, StepResult
from mindllm.train.engine.columns import completed
from mindllm.train.engine.engine import evaluation_config, weight_signatures
from mindllm.train.job.ranks import ALONE

logger = logging.getLogger(__name__)
Say = Callable[[str], None]


class LockstepEngine(Engine):
    """Every rank of the run; this process reads whole batches and deals them out.

    Args:
        say: told of the progress of compiling.
        cache: where compiled graphs are kept by content.
    """

    def __init__(
        self,
        config: RunConfig,
        training: bool = True,
        say: Say = lambda text: None,
        cache: Path | None = None,
    ) -> None:
        super().__init__(config, ALONE)
        self.parts = config.parallel_config.micro_batch_num * config.runner_config.gradient_accumulation_steps
        self._say = say
        self._cache = cache or cache_directory()
        self._columns = input_columns(config)
        self._stages = mesh_of(config).pipeline_stage
        self._cluster: Cluster | None = None
        self._evaluation: LossCluster | None = None
        if training:
            graphs = self._compile(config, training=True)
            self._cluster = Cluster(graphs, self._stages, input_slices(config), initial_weights(config))
        else:
            self._evaluation = self._loss_cluster()

    def _compile(self, config: RunConfig, training: bool) -> list[CompiledGraph]:
        begun = time.monotonic()
        what = "training" if training else "evaluation"
        with RankCompilation(config, self._cache, training=training) as compilation:
            total = compilation.devices
            logger.info("compiling the %s graphs of %d ranks, %d at a time", what, total, compilation.workers)
            graphs = compilation.graphs(lambda done: self._say(f"compiling the {what} graphs: {done} of {total} ranks"))
        self._say("")
        logger.info("compiled the %s graphs of %d ranks in %.1f s", what, total, time.monotonic() - begun)
        return graphs

    def _loss_cluster(self) -> LossCluster:
        """What evaluates; its weights are put or taken before it is used."""
        config = evaluation_config(self.config)
        graphs = self._compile(config, training=False)
        unknown = {
            name: np.broadcast_to(np.float32(0), shape) for name, (shape, _) in weight_signatures(config).items()
        }
        return LossCluster(graphs, self._stages, input_slices(config), unknown)

    def step(self, batch: Batch, rate: float, scale: float) -> StepResult:
        assert self._cluster is not None
        step = self._cluster.step(completed(batch, self._columns), rate, scale)
        return StepResult(step.loss, step.norms[0], step.overflows[0], step.tokens[0])

    def evaluate(self, batch: Batch) -> tuple[float, int]:
        if self._evaluation is None:
            self._evaluation = self._loss_cluster()
        if self._cluster is not None:
            self._evaluation.take_weights(self._cluster)
        return self._evaluation.evaluate(completed(batch, self._columns))

    def not_finite(self, batch: Batch) -> list[str]:
        assert self._cluster is not None
        bad = weights_not_finite(self._cluster)
        return (
            [f"weight {name}" for name in bad]
            if bad
            else first_not_finite(self._cluster, completed(batch, self._columns))
        )

    def local_state(self) -> Mapping[int, RankTensors]:
        assert self._cluster is not None
        return self._cluster.local_state()

    def counts(self) -> Mapping[str, np.ndarray]:
        return {} if self._cluster is None else self._cluster.counts()

    def load_state(self, arrays: Mapping[str, Any]) -> None:
        for cluster in (self._cluster, self._evaluation):
            if cluster is not None:
                cluster.load_state(arrays)
