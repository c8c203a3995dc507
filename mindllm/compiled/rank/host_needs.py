"""How much of this machine's memory it takes to compile a rank, and to hold its graph, from the configuration alone.

Measured with MindSpore 2.10 on small models of every kind of layer (docs/cluster_check.md has the figures): MindSpore's front end
reads the layers of all pipeline stages, whichever a rank holds, and widths hardly matter, since no weight is made.
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
MANY_LAYERS = 128  # so many take twice as much each as few do
LAYER, OF_EXPERTS, OF_LATENT_ATTENTION, OF_PREDICTION = 60 * MIB, 60 * MIB, 90 * MIB, 60 * MIB
GRAPH, GRAPH_OF_LAYER = 3 * MIB, 2 * MIB


def compile_bytes(config: RunConfig) -> int:
    """Memory that the process takes which compiles a rank."""
    layers = config.model.config.architecture.layers
    read = int(sum(map(_layer_bytes, layers)) * (1 + len(layers) / MANY_LAYERS))
    passes = config.parallel_config.micro_batch_num * config.parallel_config.pipeline_stage
    return PROCESS + read * _unrolled(config) + passes * PASS


def graph_bytes(config: RunConfig) -> int:
    """Memory that the graph of a rank takes while it is executed, without its values."""
    chunks = config.parallel_config.pipeline_stage * config.model.config.pp_interleave_num
    on_stage = -(-len(config.model.config.architecture.layers) // chunks) * config.model.config.pp_interleave_num
    return GRAPH + on_stage * _unrolled(config) * GRAPH_OF_LAYER


@contextmanager
def claimed(config: RunConfig) -> Iterator[None]:
    """Claims the memory of one rank that is compiled.

    Raises:
        UserError: there is not enough.
    """
    with MemoryClaim() as claim:
        require(claim, config)
        claim.take(compile_bytes(config))
        yield


def require(claim: MemoryClaim, config: RunConfig) -> None:
    """Raises a UserError where a rank of ``config`` cannot be compiled within the budget of ``claim``."""
    if not claim.fits(wanted := compile_bytes(config)):
        raise UserError(
            f"compiling a rank takes about {gibibytes(wanted)} of memory, and there are {claim.describe()}: {ADVICE}"
        )


def _layer_bytes(spec: LayerSpec) -> int:
    of_experts = 0 if isinstance(spec.feed_forward, FeedForwardSpec) else OF_EXPERTS
    of_attention = OF_LATENT_ATTENTION if isinstance(spec.attention, LatentAttentionSpec) else 0
    return LAYER + of_experts + of_attention + OF_PREDICTION * spec.is_mtp


def _unrolled(config: RunConfig) -> int:
    """How often the graph of a step has a layer: for every accumulation step, and every copy of the model."""
    return config.runner_config.gradient_accumulation_steps * config.micro_batch_interleave_num
