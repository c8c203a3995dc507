"""What a step does beside its layers: embedding, final norm, head and loss, exchanges between replicas, the update."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mindllm.config.architecture import EMBEDDING, Architecture
from mindllm.config.layers import LayerSpec, scalars
from mindllm.config.tuning import ADALORA, GALORE, is_trained
from mindllm.errors import UserError
from mindllm.timing.layer import NORM_PASSES
from mindllm.timing.work import HALF, WHOLE, Exchange, Operator, Work, elementwise, product
from mindllm.timing.workload import Numerics, Strategy, Workload

LOSS_PASSES = (
    4.0  # of logits in single precision: cast, maximum, sum of exponentials, and the gradient's read in between
)
LOOKUP_PASSES = 2.0
UPDATE_BYTES = 7 * WHOLE  # AdamW reads gradient, weight and two moments and writes the last three
CLIP_BYTES = 3 * WHOLE  # the norm reads a gradient, scaling reads and writes it


def embedding_work(architecture: Architecture, tokens: float, strategy: Strategy) -> Work:
    """Forward of the first place; its gradient takes as long."""
    size = HALF * tokens * architecture.hidden_size
    found: list[Operator | Exchange] = [elementwise("embedding.lookup", size, LOOKUP_PASSES)]
    if strategy.vocabulary_parallel:
        found.append(Exchange("embedding.reduce", "AllReduce", size))
    return tuple(found)


def head_work(architecture: Architecture, tokens: float, strategy: Strategy, numerics: Numerics) -> Work:
    """Forward of the last place: norm, logits, loss."""
    return tuple(_head(architecture, tokens, strategy, numerics))


def _head(
    architecture: Architecture, tokens: float, strategy: Strategy, numerics: Numerics
) -> Iterator[Operator | Exchange]:
    hidden, columns = architecture.hidden_size, architecture.vocab_size / strategy.model_parallel
    size = HALF * tokens * hidden
    yield elementwise(
        "norm_out.norm", size / (strategy.model_parallel if strategy.sequence_parallel else 1), NORM_PASSES[0]
    )
    if strategy.sequence_parallel:
        yield Exchange("lm_head.gather", "AllGather", size)
    yield product("lm_head.matmul", tokens, hidden, columns, numerics.compute)
    yield elementwise("loss.cross_entropy", WHOLE * tokens * columns, LOSS_PASSES)
    yield Exchange("loss.reduce", "AllReduce", 3 * WHOLE * tokens)


@dataclass(frozen=True)
class Held:
    """Parameters that a rank holds, before any split over replicas."""

    trained: float = 0.0
    frozen: float = 0.0

    def __add__(self, other: Held) -> Held:
        return Held(self.trained + other.trained, self.frozen + other.frozen)


def place_parameters(workload: Workload, place: int, layers: range) -> Held:
    """What a rank holds of a place with these layers."""
    architecture, strategy = workload.architecture, workload.strategy
    ranks, held = strategy.model_parallel, Held()
    for number in layers:
        held += layer_parameters(architecture.layers[number], ranks)
    table = architecture.vocab_size * architecture.hidden_size
    if place == 0:
        held += table_parameters(architecture, EMBEDDING, table / (ranks if strategy.vocabulary_parallel else 1))
    if place == workload.plan.stages * workload.plan.chunks - 1 and (place or not architecture.head.tied):
        held += table_parameters(architecture, architecture.head_weight, table / ranks)
    return held


def layer_parameters(spec: LayerSpec, ranks: int) -> Held:
    """What one of ``ranks`` tensor-parallel ranks holds of a layer."""
    whole, frozen = spec.weights(), set(spec.frozen)
    stays = scalars({name: shape for name, shape in whole.items() if name in frozen})
    everywhere = sum(scalars(bottleneck.weights()) for bottleneck in spec.bottlenecks)
    return Held((scalars(whole) - stays - everywhere) / ranks + everywhere, stays / ranks)


def table_parameters(architecture: Architecture, name: str, count: float) -> Held:
    """``count`` parameters of weight ``name`` outside of layers."""
    return Held(trained=count) if is_trained(architecture.pet, name) else Held(frozen=count)


def update_operator(parameters: float, workload: Workload) -> Operator:
    """Clipping and AdamW of what a rank updates.

    Raises:
        UserError: the tuning has an optimizer of its own, whose time is not modelled.
    """
    pet = workload.architecture.pet
    if pet is not None and pet.pet_type in (GALORE, ADALORA):
        raise UserError(
            f"the optimizer of pet_type {pet.pet_type} has more than AdamW's work, whose time is not modelled"
        )
    own = parameters / (workload.strategy.data_parallel if workload.strategy.optimizer_shard else 1)
    return elementwise("update", own, UPDATE_BYTES + CLIP_BYTES + HALF)


def replica_exchanges(parameters: float, workload: Workload) -> Work:
    """Gradients to the replicas; and weights back where each updates a part of them."""
    gradients = parameters * workload.numerics.gradient_bytes
    if not workload.strategy.optimizer_shard:
        return (Exchange("gradients", "AllReduce", gradients, "dp"),)
    gathered = Exchange("weights", "AllGather", parameters * HALF, "dp")
    return (Exchange("gradients", "ReduceScatter", gradients, "dp"), gathered)
