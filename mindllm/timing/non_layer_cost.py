"""What a step does beside its layers: embedding, final norm, head and loss, exchanges between replicas, the update."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import add

from mindllm.architecture.decoder import EMBEDDING, Architecture
from mindllm.architecture.layer import LayerSpec
from mindllm.architecture.optimizer_state import is_in_codes
from mindllm.architecture.tuners import Tuning, is_trained
from mindllm.timing.costs.layer import WHOLE_ON_A_RANK
from mindllm.timing.costs.orthogonal_update import orthogonal_size
from mindllm.timing.costs.tuned_update import projected_size, state_beside
from mindllm.timing.costs.work import (
    FP32_BYTES,
    HALF_BYTES,
    NORM_PASSES,
    Axis,
    Exchange,
    Operator,
    Work,
    elementwise,
    product,
)
from mindllm.timing.workload import BY_ADAMW, Strategy, UpdateRule, Workload

LOSS_PASSES = (
    4.0  # of logits in single precision: cast, maximum, sum of exponentials, and the gradient's read in between
)
LOOKUP_PASSES = 2.0
Axes = tuple[Axis, Axis, Axis]
OF_REPLICAS: Axes = ("dp", "share", "shares")
OF_EXPERTS: Axes = ("replica", "expert share", "expert shares")
UPDATE_BYTES = 7 * FP32_BYTES  # AdamW reads gradient, weight and two moments and writes the last three
CLIP_BYTES = 3 * FP32_BYTES  # the norm reads a gradient, scaling reads and writes it
CAST = HALF_BYTES + FP32_BYTES  # reads a number in one precision and writes it in the other
HALF_CLIP_BYTES = (
    3 * CAST + 3 * FP32_BYTES
)  # gradients in half precision are cast for the norm, and to be scaled and back
HALF_UPDATE_BYTES = 3 * CAST + UPDATE_BYTES + 4 * FP32_BYTES + 2 * HALF_BYTES
"""Of weights in half precision: gradient and weight are cast, and the result back; it is assigned, as moments are."""
FUSED_HALF_UPDATE_BYTES = 3 * HALF_BYTES + 4 * FP32_BYTES
"""Bytes of the same update in one kernel: it reads gradient, weight and two moments, and writes the last three."""
FUSED_HALF_CLIP_BYTES = 3 * HALF_BYTES  # the norm reads a gradient, scaling reads and writes it
MASTER_UPDATE_BYTES = UPDATE_BYTES + CAST + 2 * HALF_BYTES  # the weight is a rounded copy, which is assigned
SCALED_BYTES = 2 * HALF_BYTES + 4 * FP32_BYTES
"""Bytes of a number that a scaled loss adds to an update of Megatron-LM (``optimizer.py``, 2022): a gradient is read in half
precision and written in single, read and written to be divided by the scale and looked at for infinities; a weight is read again
for its copy in half precision, and the sum of gradients is set to nothing."""


def embedding_work(architecture: Architecture, tokens: float, strategy: Strategy) -> Work:
    """Forward of the first place; its gradient takes as long."""
    size = HALF_BYTES * tokens * architecture.hidden_size
    found: list[Operator | Exchange] = [elementwise("embedding.lookup", size, LOOKUP_PASSES)]
    if strategy.vocabulary_parallel:
        found.append(Exchange("embedding.reduce", "AllReduce", size))
    return tuple(found)


def prediction_work(workload: Workload, tokens: float) -> Work:
    """What a layer that predicts ahead has beside itself, forward: the lookup of tokens to come, norm, logits, loss."""
    return of_tokens_ahead(
        (*embedding_work(workload.architecture, tokens, workload.strategy), *head_work(workload, tokens))
    )


def of_tokens_ahead(work: Work) -> Work:
    """The same operators under the names of those that predict ahead."""
    return tuple(replace(one, name=f"ahead.{one.name}") for one in work)


def head_work(workload: Workload, tokens: float) -> Work:
    """Forward of the last place: norm, logits, loss."""
    return (*_before_loss(workload, tokens), *loss_work(workload, tokens))


def _before_loss(workload: Workload, tokens: float) -> Iterator[Operator | Exchange]:
    size = HALF_BYTES * tokens * workload.architecture.hidden_size
    yield elementwise("norm_out.norm", size / workload.strategy.sequence_ranks, NORM_PASSES[0])
    if workload.strategy.sequence_parallel:
        yield Exchange("lm_head.gather", "AllGather", size)


def loss_work(workload: Workload, tokens: float) -> Work:
    """Logits and loss, forward, slice by slice."""
    return workload.loss_chunks * tuple(_slice(workload, tokens / workload.loss_chunks))


def _slice(workload: Workload, tokens: float) -> Iterator[Operator | Exchange]:
    hidden, columns = workload.architecture.hidden_size, _columns(workload)
    yield product("lm_head.matmul", tokens, hidden, columns, workload.numerics.compute)
    yield elementwise("loss.cross_entropy", FP32_BYTES * tokens * columns, LOSS_PASSES)
    yield Exchange("loss.reduce", "AllReduce", 3 * FP32_BYTES * tokens)


def repeated_loss(workload: Workload, tokens: float) -> Work:
    """What the backward pass computes again of :func:`head_work`: of a loss in slices no logits are kept."""
    return loss_work(workload, tokens) if workload.loss_chunks > 1 else ()


def sums_of_slices(workload: Workload) -> Work:
    """Every slice of the loss has a gradient of the head's weight; they are added up."""
    size = HALF_BYTES * workload.architecture.hidden_size * _columns(workload)
    return (workload.loss_chunks - 1) * (elementwise("lm_head.weight_sum", size, 3.0),)


def _columns(workload: Workload) -> float:
    return workload.architecture.vocab_size / workload.strategy.model_parallel


def shared_table(workload: Workload) -> Exchange | None:
    """The embedding that the last stage is sent in every step, and whose gradient it sends back; None where it needs none."""
    architecture, strategy = workload.architecture, workload.strategy
    if workload.plan.last_stage == 0 or not (architecture.head.tied or architecture.predictions):
        return None
    ranks = strategy.model_parallel if strategy.vocabulary_parallel else 1
    return Exchange(
        "embedding",
        "Send",
        workload.update.weight_bytes * architecture.vocab_size * architecture.hidden_size / ranks,
        "pp",
    )


@dataclass(frozen=True)
class Held:
    """Parameters that a rank holds, before any split over replicas: those of ``experts`` have replicas of their own.

    Attributes:
        whole_experts: those of experts whose state each of their replicas has (:meth:`Strategy.expert_shards`).
        projected: numbers of the trained ones that the rank updates otherwise than by AdamW.
        state: bytes that a rank keeps of optimizer state beside two moments of all it updates; below zero where it is less.
        codes: bytes of projections that are held in codes.
        coded: numbers of the trained ones whose moments are in codes, and of how many weights.
        alike: of the trained ones those that tensor-parallel ranks have alike, so that these are replicas, too.
        made: bytes of what is made of them once in a step: casts that products read, and the embedding as it is gathered.
    """

    trained: float = 0.0
    frozen: float = 0.0
    experts: float = 0.0
    whole_experts: float = 0.0
    projected: float = 0.0
    state: float = 0.0
    codes: float = 0.0
    coded: float = 0.0
    coded_weights: float = 0.0
    made: float = 0.0
    alike: float = 0.0

    def __add__(self, other: Held) -> Held:
        return Held(*map(add, vars(self).values(), vars(other).values()))

    def __rmul__(self, count: int) -> Held:
        return Held(*(count * one for one in vars(self).values()))

    @property
    def updated(self) -> float:
        """All that training changes."""
        return self.trained + self.experts

    def own(self, strategy: Strategy) -> float:
        """Whose optimizer state a rank keeps, and which it updates."""
        return self.whole_experts + sum(
            numbers / strategy.shards(replicas) for numbers, replicas in self.shared(strategy)
        )

    def shared(self, strategy: Strategy) -> tuple[tuple[float, int], ...]:
        """Those that training changes and that replicas may share, and how many replicas of these there are."""
        return (
            (self.trained - self.alike, strategy.replica_num),
            (self.alike, strategy.replica_num * strategy.model_parallel),
            (self.experts - self.whole_experts, strategy.expert_replicas),
        )


def place_parameters(workload: Workload, place: int, layers: range) -> Held:
    """What a rank holds of a place with these layers."""
    held = Held()
    for kind, count in Counter(workload.architecture.specification_numbers[layers.start : layers.stop]).items():
        held += count * _kinds_parameters(workload)[kind]
    if place == 0:
        held += embedding_parameters(workload)
    return held + last_parameters(workload) if place == workload.plan.last_place else held


def embedding_parameters(workload: Workload) -> Held:
    """What a rank holds of the embedding: all of it, or its part of the vocabulary. Its rows are looked up in single precision,
    where replicas share its state in what was gathered; as a head on the same stage it is cast, too.
    """
    architecture, strategy = workload.architecture, workload.strategy
    table = architecture.vocab_size * architecture.hidden_size
    size = table / (strategy.model_parallel if strategy.vocabulary_parallel else 1)
    held = table_parameters(architecture, EMBEDDING, size, workload.update)
    if held.frozen:
        return held
    held += Held(alike=0.0 if strategy.vocabulary_parallel else size)
    rule = workload.update
    gathered = rule.weight_bytes if held.own(strategy) < size else 0
    multiplied = HALF_BYTES if rule.casts_weights and architecture.head.tied and workload.plan.last_stage == 0 else 0
    return held + Held(made=(gathered + multiplied) * size)


def last_parameters(workload: Workload) -> Held:
    """What a rank holds of the last place beside its layers: the head, and the embedding where layers predict ahead.

    Where it is on the first stage, the embedding is there, and a tied head is the embedding. Elsewhere MindSpore
    sends it, and it has accumulators but no moments, for the first stage updates it.
    """
    architecture, alone = workload.architecture, workload.plan.last_stage == 0
    held = Held()
    if not architecture.head.tied:
        table = architecture.vocab_size * architecture.hidden_size
        size = table / workload.strategy.model_parallel
        head = table_parameters(architecture, architecture.head_weight, size, workload.update)
        made = made_once(size - head.frozen, workload.strategy.shards(workload.strategy.replica_num), workload.update)
        held += head + Held(made=made)
    if alone or not (architecture.head.tied or architecture.predictions):
        return held
    sent = embedding_parameters(workload)
    moments = 2 * FP32_BYTES * sent.own(workload.strategy) if workload.numerics.forms.casts else 0.0
    return held + sent + Held(state=-moments)


@lru_cache(maxsize=256)
def _kinds_parameters(workload: Workload) -> dict[int, Held]:
    """What a rank holds of each kind of layer."""
    layers = workload.architecture.layers
    return {
        kind: layer_parameters(layers[kind], workload.strategy, workload.architecture.pet, workload.update)
        for kind in set(workload.architecture.specification_numbers)
    }


EXPERTS = "feed_forward.experts."
ROUTER = "feed_forward.router."  # its product is in single precision


def layer_parameters(
    spec: LayerSpec, strategy: Strategy, pet: Tuning | None = None, rule: UpdateRule = BY_ADAMW
) -> Held:
    """What a rank holds of a layer that is tuned so, and updated by this rule."""
    held = Held(projected=projected_size(spec, strategy, pet), state=state_beside(spec, strategy, pet))
    alone = orthogonal_size(spec, strategy, rule)
    held += Held(projected=alone, state=-FP32_BYTES * alone)
    coded = {f"{code.module}.weight": code.nbytes for code in spec.codes}
    for name, shape in spec.weights().items():
        size = float(math.prod(shape))
        if name.startswith(EXPERTS):
            size /= strategy.expert_parallel * strategy.expert_tensor_parallel
        elif not name.startswith(WHOLE_ON_A_RANK):
            size /= strategy.model_parallel
        if name in coded:
            held += Held(codes=coded[name] * size / math.prod(shape))
        elif name in spec.frozen:
            held += Held(frozen=size, made=HALF_BYTES * size if strategy.pieces > 1 else 0.0)
        else:
            shards = _shards(name, shape, strategy)
            held += Held(made=made_once(size, shards, rule) if casts_once(strategy) else 0.0)
            held += _of_experts(shape, size, strategy) if name.startswith(EXPERTS) else Held(trained=size)
            held += _in_codes(shape, size, rule)
    return held


def made_once(size: float, shards: int, rule: UpdateRule) -> float:
    """Return the bytes of what is made of ``size`` numbers of weights for a whole step: casts, or what replicas gather."""
    return HALF_BYTES * size if rule.casts_weights or shards > 1 else 0.0


def _shards(name: str, shape: tuple[int, ...], strategy: Strategy) -> int:
    """Return how many replicas share the state of a weight."""
    return strategy.expert_shards(shape[0]) if name.startswith(EXPERTS) else strategy.shards(strategy.replica_num)


def is_cast_by_every_pass(name: str, spec: LayerSpec, strategy: Strategy, rule: UpdateRule = BY_ADAMW) -> bool:
    """Return True if a weight of a layer is a matrix that every pass reads by itself: a cast, or the weight if it needs none.
    Frozen ones always are.
    """
    made = bool(made_once(1.0, _shards(name, spec.weights()[name], strategy), rule))
    if strategy.pieces > 1 or (casts_once(strategy) and made and name not in spec.frozen):
        return False
    in_codes = any(name == f"{code.module}.weight" for code in spec.codes)
    return len(spec.weights()[name]) > 1 and not name.startswith(ROUTER) and not in_codes


def casts_once(strategy: Strategy) -> bool:
    """Whether weights of layers are cast once in a step: MindSpore does so with optimizer parallel, whether or not a state is
    shared. Pieces of sequences are left to ``timing/memory.py``: each casts all that it reads.
    """
    return strategy.optimizer_shard or strategy.pieces > 1


def _of_experts(shape: tuple[int, ...], size: float, strategy: Strategy) -> Held:
    """``size`` numbers that a rank has of a stack of experts."""
    alone = strategy.expert_shards(shape[0]) < strategy.shards(strategy.expert_replicas)
    return Held(experts=size, whole_experts=size if alone else 0.0)


def _in_codes(shape: tuple[int, ...], size: float, rule: UpdateRule) -> Held:
    return Held(coded=size, coded_weights=1.0) if is_in_codes(shape, rule.block) else Held()


def table_parameters(architecture: Architecture, name: str, count: float, rule: UpdateRule = BY_ADAMW) -> Held:
    """``count`` parameters of weight ``name`` outside of layers."""
    if not is_trained(architecture.pet, name):
        return Held(frozen=count)
    return Held(trained=count) + _in_codes((architecture.vocab_size, architecture.hidden_size), count, rule)


def coded_numbers(held: Held, strategy: Strategy) -> float:
    """Numbers that a rank updates whose moments are in codes."""
    return held.coded / strategy.shards(strategy.replica_num)


def update_operator(held: Held, workload: Workload) -> Operator:
    """Clipping and AdamW of what a rank updates; behind a scaled loss also what that takes."""
    rule = workload.update
    passes = UPDATE_BYTES + CLIP_BYTES + HALF_BYTES + SCALED_BYTES * workload.numerics.scaled_loss
    if rule.in_half and rule.fuses_casts and not rule.master_weights:
        passes = FUSED_HALF_UPDATE_BYTES + FUSED_HALF_CLIP_BYTES
    elif rule.in_half:
        passes = (MASTER_UPDATE_BYTES if rule.master_weights else HALF_UPDATE_BYTES) + HALF_CLIP_BYTES
    otherwise = held.projected + coded_numbers(held, workload.strategy)
    return elementwise("update", held.own(workload.strategy) - otherwise, passes)


def replica_exchanges(held: Held, workload: Workload) -> Work:
    """Gradients to the replicas; and weights back where each updates a part of them.

    Where some replicas share the optimizer state, gradients are reduced among them, and the part of each among those that have
    the same one. Accumulators in parts are given theirs of every micro-batch (``VirtualAssignAdd`` of MindSpore's ``level2``).
    """
    strategy = workload.strategy
    found = _exchanged(("gradients", "weights"), held.trained, strategy.replica_num, OF_REPLICAS, workload)
    if not held.experts:
        return found
    names, replicas = ("gradients of experts", "weights of experts"), strategy.expert_replicas
    if shared := held.experts - held.whole_experts:
        found += _exchanged(names, shared, replicas, OF_EXPERTS, workload)
    if held.whole_experts:
        size = held.whole_experts * workload.numerics.gradient_bytes
        found = (*found, Exchange(names[0], "AllReduce", size, OF_EXPERTS[0]))
    return found


def _exchanged(names: tuple[str, str], parameters: float, replicas: int, axes: Axes, workload: Workload) -> Work:
    """``axes``: all replicas, those that share the state, and those that have the same part of it."""
    strategy, (gradients, weights), (every, share, shares) = workload.strategy, names, axes
    size, shards = parameters * workload.numerics.gradient_bytes, strategy.shards(replicas)
    times = strategy.times_reduced
    if shards == 1:
        return (Exchange(gradients, "AllReduce", size, every),) * times
    inside = every if shards == replicas else share
    summed: Work = (Exchange(gradients, "ReduceScatter", size, inside),)
    if shards < replicas:
        summed = (*summed, Exchange(gradients, "AllReduce", size / shards, shares))
    return (*summed * times, Exchange(weights, "AllGather", parameters * HALF_BYTES, inside))
