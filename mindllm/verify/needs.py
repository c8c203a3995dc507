"""How much memory of this machine a check takes, told before anything is compiled, and the small model that fits into it.

Measured on this package's forms and on models of several kinds (see docs/cluster_check.md). Both sides stand in one process: the
single device, whose activations count every token of the global batch, and all ranks with their graphs and their parts of
weights and optimizer state. Beside it ranks are compiled.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from mindllm.architecture.layer import LayerSpec
from mindllm.architecture.parts import FeedForwardSpec
from mindllm.compiled.rank.host_needs import compile_bytes, graph_bytes
from mindllm.config import RunConfig
from mindllm.errors import UserError
from mindllm.process.host_memory import ADVICE, MemoryClaim, gibibytes
from mindllm.reduced_runs.mesh import reduced_meshes
from mindllm.reduced_runs.model import reduce_model, single_device

FP32 = 4
RECORDED = 6  # forward and backward, what is recomputed, on both sides
STATES = 12  # copies of weights and optimizer state on the single device: its own, one after every step, results
OWN = 3  # copies of a rank: weights and two moments
KEPT = 30  # values of a layer's width that a step keeps for each token, and as many of each expert's
"""Measured with 8 and 16 experts: see docs/cluster_check.md."""


@dataclass(frozen=True)
class Needs:
    """Bytes: of a rank's process while it is compiled, of the single device, of all ranks while they are executed."""

    worker: int
    single: int
    ranks: int

    def total(self, workers: int) -> int:
        """The most at a time: ranks are executed when all are compiled."""
        return self.single + max(workers * self.worker, self.ranks)


@dataclass(frozen=True)
class SmallModel:
    """What is checked in place of a configuration; ``needs`` of it and ``workers``, the ranks that are compiled at a time."""

    config: RunConfig
    needs: Needs
    workers: int


def needs_of(small: RunConfig) -> Needs:
    """What checking a small model takes."""
    ranks, weights = small.parallel_config.device_num, small.model.config.parameter_count() * FP32
    activations = _activations(small)
    single = compile_bytes(single_device(small)) + STATES * weights + activations
    copies = OWN * weights * ranks // small.parallel_config.pipeline_stage
    return Needs(compile_bytes(small), single, ranks * graph_bytes(small) + copies + activations)


def recorded_bytes(small: RunConfig) -> int:
    """What it takes to keep every value of every operator of both sides, and to compile the single device once more."""
    return RECORDED * _activations(small) + compile_bytes(single_device(small))


def _activations(small: RunConfig) -> int:
    """What the layers keep of a global batch for the backward pass, in fp32."""
    tokens = small.global_batch_size * small.model.config.seq_length
    return tokens * FP32 * sum(KEPT * _values(spec) for spec in small.model.config.architecture.layers)


def _values(spec: LayerSpec) -> int:
    """Channels that a layer has for each token; every expert has room for all of them."""
    hidden = spec.attention.hidden_size
    return hidden if isinstance(spec.feed_forward, FeedForwardSpec) else hidden * (1 + spec.feed_forward.router.experts)


def fitting(
    config: RunConfig, real_dtype: bool, claim: MemoryClaim, most_ranks: int, workers: int | None
) -> SmallModel:
    """The small model of ``config`` on the most of its mesh that memory and ``most_ranks`` allow; memory is claimed.

    Raises:
        UserError: the smallest one does not fit.
    """
    least, cores = None, workers or len(os.sched_getaffinity(0))
    found = list(reduced_meshes(config))
    for mesh in found:
        if mesh.device_num > most_ranks:
            continue
        try:
            small = reduce_model(config, real_dtype, mesh)
        except UserError:
            if mesh == found[0]:
                raise
            continue  # sizes that do not go together for another reason than the kind of the mesh
        needs = needs_of(small)
        least = needs.total(1) if least is None else min(least, needs.total(1))
        if claim.fits(needs.total(1)):
            at_once = next(
                count for count in range(min(cores, mesh.device_num), 0, -1) if claim.fits(needs.total(count))
            )
            claim.take(needs.total(at_once))
            return SmallModel(small, needs, at_once)
    if least is None:
        fewest = min(mesh.device_num for mesh in found)
        raise UserError(f"--most_ranks {most_ranks}: the smallest mesh of this kind has {fewest}; allow more")
    raise UserError(
        f"checking the smallest model of this kind takes about {gibibytes(least)}, and there are {claim.describe()}: {ADVICE}"
    )
