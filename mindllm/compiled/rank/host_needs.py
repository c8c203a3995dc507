"""Estimate the memory of this machine for compiling a rank and for its graph, from the configuration alone.

Measured with MindSpore 2.10 on small models of every kind of layer (docs/cluster_check_method.md). MindSpore's front end reads
the layers of all pipeline stages on every rank. Widths hardly matter, because no weight is allocated.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mindllm.architecture.layer import LayerSpec
from mindllm.architecture.parts import FeedForwardSpec, LatentAttentionSpec
from mindllm.config import RunConfig
from mindllm.errors import UserError
from mindllm.jobs.memory import ADVICE, MemoryClaim, gibibytes
from mindllm.units import MIB

PROCESS, PASS = 600 * MIB, 2 * MIB  # MindSpore itself; a micro-batch on a stage
MANY_LAYERS = 128  # with this many, each layer takes twice as much as one of a few
LAYER, EXPERTS, LATENT_ATTENTION, PREDICTION = 60 * MIB, 60 * MIB, 90 * MIB, 60 * MIB
GRAPH, GRAPH_LAYER = 3 * MIB, 2 * MIB


def compile_bytes(config: RunConfig) -> int:
    """Return the memory of a process that compiles a rank."""
    layers = config.model.config.architecture.layers
    front_end = int(sum(map(_layer_bytes, layers)) * (1 + len(layers) / MANY_LAYERS))
    passes = config.parallel_config.micro_batch_num * config.parallel_config.pipeline_stage
    return PROCESS + front_end * _layer_copies(config) + passes * PASS


def graph_bytes(config: RunConfig) -> int:
    """Return the memory of a rank's graph while it is executed, without values."""
    chunks = config.parallel_config.pipeline_stage * config.model.config.pp_interleave_num
    on_stage = -(-len(config.model.config.architecture.layers) // chunks) * config.model.config.pp_interleave_num
    return GRAPH + on_stage * _layer_copies(config) * GRAPH_LAYER


@contextmanager
def claimed(config: RunConfig) -> Iterator[None]:
    """Claim the memory to compile a rank.

    Raises:
        UserError: there is not enough memory.
    """
    with MemoryClaim() as claim:
        require(claim, config)
        claim.take(compile_bytes(config))
        yield


def require(claim: MemoryClaim, config: RunConfig) -> None:
    """Raise UserError if compiling a rank exceeds the budget of ``claim``."""
    if not claim.fits(size := compile_bytes(config)):
        raise UserError(
            f"compiling a rank takes about {gibibytes(size)} of memory, and there are {claim.describe()}: {ADVICE}"
        )


def _layer_bytes(spec: LayerSpec) -> int:
    experts = 0 if isinstance(spec.feed_forward, FeedForwardSpec) else EXPERTS
    attention = LATENT_ATTENTION if isinstance(spec.attention, LatentAttentionSpec) else 0
    return LAYER + experts + attention + PREDICTION * spec.is_mtp


def _layer_copies(config: RunConfig) -> int:
    """Return how often the graph of a step contains a layer: for each accumulation step and each copy of the model."""
    return config.runner_config.gradient_accumulation_steps * config.micro_batch_interleave_num
