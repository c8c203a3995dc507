"""What there is of weights in half precision, and of their gradients, as a step goes on: as MindSpore's dry runs show it.

With optimizer parallel a weight is cast once in a step, gathered where replicas share it, and stays until the last pass has read
it. Otherwise every pass casts it anew and keeps it for its backward pass. Grouped products read transposed weights: those are
made and kept by every pass, whatever there is beside them.

Gradients are added to accumulators in single precision where there are several micro-batches or stages. Otherwise each is cast to
single precision and summed over the replicas, where every part of a shared state gets its own: so when the update begins, weights
in half precision are gone, and gradients are as large as the part that a rank updates.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from mindllm.architecture.experts import ExpertsSpec
from mindllm.architecture.layer import LayerSpec
from mindllm.timing.costs.feed_forward import own_places, sends_tokens
from mindllm.timing.costs.layer import WHOLE_ON_A_RANK
from mindllm.timing.costs.work import FP32_BYTES, HALF_BYTES
from mindllm.timing.non_layer_cost import EXPERTS, Held, is_cast_by_every_pass, layer_parameters
from mindllm.timing.saved_activations import kept_results
from mindllm.timing.workload import Strategy, Workload

BACKWARD_ORDER = ("w2", "w3", "w1")
"""Of the matrices of a feed-forward part, as their gradients come."""


def weights_and_gradients(held: Held, workload: Workload) -> float:
    """Bytes of gradients, and of weights in half precision that were made for a whole step, through its backward passes.

    Where nothing is accumulated they are all gradients; what layers keep has weights instead, as far as gradients are not there
    yet (:func:`kept_of_weights`).
    """
    strategy = workload.strategy
    if not workload.numerics.forms.casts:
        gradient = FP32_BYTES if strategy.micro_batches * strategy.accumulation > 1 else HALF_BYTES
        return held.updated * (gradient + HALF_BYTES)
    size = workload.sum_bytes
    if workload.keeps_gradients:
        return gradients_of_update(held, workload) + size * held.updated * workload.accumulates
    return held.made + size * (held.own(strategy) if strategy.accumulators_shard else held.updated)


def gradients_of_update(held: Held, workload: Workload) -> float:
    """Bytes of gradients beside accumulators: sums over the replicas that the update reads; of a device alone those of a pass."""
    strategy = workload.strategy
    if workload.accumulates and strategy.accumulators_shard:
        return 0.0
    kinds = (*held.shared(strategy), (held.whole_experts, 1))
    return workload.sum_bytes * sum(_of_replicas(numbers, replicas, workload) for numbers, replicas in kinds)


def _of_replicas(numbers: float, replicas: int, workload: Workload) -> float:
    """How many there are of the gradients of so many numbers. Where some replicas share a state that others have, too, parts are
    summed among the former, then among the latter: one message behind the last gradient, until which all that is summed is there.
    """
    shards = workload.strategy.shards(replicas)
    of_parts = numbers / shards * (2 if shards < replicas else 1) if shards > 1 else 0.0
    if not workload.keeps_gradients:
        return of_parts
    return of_parts + (numbers if shards == 1 or shards < replicas else 0.0)


def left_by_pass(held: Held, workload: Workload) -> float:
    """Bytes of gradients that a micro-batch's backward pass leaves until it ends, where accumulators are parts: those in single
    precision and the parts that were summed, which are added to accumulators when another exchange is waited for.
    """
    strategy = workload.strategy
    if not (workload.accumulates and strategy.optimizer_shard and strategy.accumulators_shard):
        return 0.0
    kinds = ((numbers, strategy.shards(replicas)) for numbers, replicas in held.shared(strategy))
    size = workload.sum_bytes
    return size * sum(numbers * (1 + 1 / shards) for numbers, shards in kinds if shards > 1)


def more_at_update(held: Held, workload: Workload) -> float:
    """What there is of them in the update beyond that, in bytes; below zero where it is less."""
    if not workload.numerics.forms.casts or not workload.accumulates:
        return 0.0
    gradients = gradients_of_update(held, workload)
    return -gradients if workload.keeps_gradients else gradients - held.made


def before_gradient(held: Held, workload: Workload) -> float:
    """Return the bytes that weights outside of layers have more before their gradients come in the only pass of a step.

    They are below zero where their gradients, which the state has, are larger than their casts.
    """
    if not workload.keeps_gradients or not workload.numerics.forms.casts:
        return 0.0
    return held.made - gradients_of_update(held, workload)


def copied_at_norm(held: Held, workload: Workload) -> float:
    """Return the bytes of copies of accumulators that the norm of all gradients reads where the step has no other gradients.

    They are gone before weights are updated one after the other. One device adds up in a graph of its own (``train/step.py``).
    Gradients in half precision are copied by their casts, with optimizer parallel one by one.
    """
    strategy = workload.strategy
    shares = strategy.shards(strategy.replica_num) > 1
    copies = workload.accumulates and not shares and strategy.device_num > 1
    if not copies or not workload.numerics.forms.casts or (workload.update.in_half and strategy.optimizer_shard):
        return 0.0
    return FP32_BYTES * held.updated


def scaled_at_update(held: Held, workload: Workload) -> float:
    """Return the bytes of gradients in half precision that are scaled before the first weight is updated.

    Without optimizer parallel each is scaled when its weight is updated, and so are those of a rank's part.
    """
    strategy, rule = workload.strategy, workload.update
    shares = strategy.shards(strategy.replica_num) > 1
    scales = workload.accumulates and strategy.optimizer_shard and not shares and strategy.device_num > 1
    if not scales or not rule.in_half or rule.master_weights or not workload.numerics.forms.casts:
        return 0.0
    return workload.sum_bytes * held.updated


def zeros_of_accumulators(workload: Workload) -> float:
    """Bytes of the zeros that clear accumulators on a device alone: constants, one for each shape of weight."""
    if not workload.accumulates or not workload.keeps_gradients:
        return 0.0
    return float(workload.sum_bytes * sum(map(math.prod, set(workload.architecture.trained_shapes().values()))))


def squares_at_norm(workload: Workload) -> float:
    """Bytes of the squares of a rank's part of a layer's weight, of the one where they are most."""
    if not workload.numerics.forms.casts:
        return 0.0
    most = max(
        (size for spec in workload.architecture.specifications() for size in own_sizes(spec, workload)), default=0.0
    )
    # Numbers in half precision are cast before they are squared.
    casts = workload.update.in_half and workload.strategy.optimizer_shard
    return FP32_BYTES * most * (1 + casts)


def own_sizes(spec: LayerSpec, workload: Workload) -> list[float]:
    """Return the numbers of each trained weight of a layer that a rank updates."""
    strategy, shapes = workload.strategy, spec.weights()
    return [
        size
        / (
            strategy.expert_shards(shapes[name][0])
            if name.startswith(EXPERTS)
            else strategy.shards(strategy.replica_num)
        )
        for name, size in _numbers(spec, strategy).items()
        if name not in spec.frozen
    ]


def kept_of_weights(workload: Workload, spec: LayerSpec, again: bool = False) -> float:
    """Bytes of a layer's weights that a pass keeps, of one that is computed ``again`` none of its own, unless nothing orders
    casts behind other passes. The only pass of a step frees them all, and leaves gradients, which :func:`weights_and_gradients`
    has of all layers.
    """
    if workload.strategy.pieces > 1 or not workload.numerics.forms.casts:
        return 0.0
    early = workload.strategy.device_num > 1 and not workload.calls_network
    kept = _cast_and_kept(workload, spec) if early or not again else 0.0
    kept += 0.0 if again else _transposed(workload, spec)
    if not workload.keeps_gradients:
        return kept
    held = layer_parameters(spec, workload.strategy, workload.architecture.pet, workload.update)
    return kept + held.made - _only_forward(workload, spec) - gradients_of_update(held, workload)


def _cast_and_kept(workload: Workload, spec: LayerSpec) -> float:
    """Return the bytes of matrices that products read as they were cast. Grouped products read others, and weights in the
    type of products are read as they are.
    """
    grouped = isinstance(spec.feed_forward, ExpertsSpec) and spec.feed_forward.grouped
    as_they_are: Collection[str] = spec.frozen if holds_frozen_in_half(workload) else ()
    if not workload.update.casts_weights:
        as_they_are = spec.weights()
    return HALF_BYTES * sum(
        size
        for name, size in _numbers(spec, workload.strategy).items()
        if is_cast_by_every_pass(name, spec, workload.strategy, workload.update)
        and name not in as_they_are
        and not (grouped and name.startswith(EXPERTS))
    )


def holds_frozen_in_half(workload: Workload) -> bool:
    """Whether matrices that are not trained are parameters in half precision."""
    pet = workload.architecture.pet
    return pet is not None and pet.frozen_dtype != "float32"


def _transposed(workload: Workload, spec: LayerSpec, frozen: bool = True) -> float:
    if not isinstance(spec.feed_forward, ExpertsSpec) or not spec.feed_forward.grouped:
        return 0.0
    left_out = () if frozen else spec.frozen
    numbers = _numbers(spec, workload.strategy)
    return HALF_BYTES * sum(size for name, size in numbers.items() if name.startswith(EXPERTS) and name not in left_out)


def _numbers(spec: LayerSpec, strategy: Strategy) -> dict[str, float]:
    """How many numbers a rank has of each weight of a layer, whoever shares its state."""
    found = {}
    for name, shape in spec.weights().items():
        ranks = strategy.model_parallel
        if name.startswith(EXPERTS):
            ranks = strategy.expert_parallel * strategy.expert_tensor_parallel
        elif name.startswith(WHOLE_ON_A_RANK):
            ranks = 1
        found[name] = math.prod(shape) / ranks
    return found


def read_forward(workload: Workload, spec: LayerSpec) -> float:
    """Bytes of the state's weights in half precision which backward passes read otherwise: gone behind the last pass forward."""
    return _only_forward(workload, spec) if workload.accumulates else 0.0


def _only_forward(workload: Workload, spec: LayerSpec) -> float:
    return _transposed(workload, spec, frozen=False) if workload.strategy.optimizer_shard else 0.0


def gradients_of_weights(workload: Workload, spec: LayerSpec) -> float:
    """Bytes that the gradients of a feed-forward part's weights need at their fullest moment, beside what stays of them.

    Products yield them in half precision, of capacity's experts for each sequence, of grouped ones transposed. The next ones come
    when the weights before them, of a step's one pass or its own, are gone, but casts of their gradients are still read by
    exchanges.
    """
    if not workload.numerics.forms.casts:
        return 0.0
    strategy, most, before = workload.strategy, 0.0, 0.0
    experts = spec.feed_forward if isinstance(spec.feed_forward, ExpertsSpec) else None
    part = EXPERTS if experts else "feed_forward."
    numbers = {
        name.removeprefix(part).split(".")[0]: size
        for name, size in _numbers(spec, strategy).items()
        if name.startswith(part) and name not in spec.frozen
    }
    replicas = strategy.expert_replicas if experts else strategy.replica_num
    joined = experts is not None and sends_tokens(experts, strategy)
    yields = [numbers[name] for name in BACKWARD_ORDER if name in numbers]
    if joined:  # both projections up are one product's
        yields = [yields[0], sum(yields[1:])]
    times = _times_yielded(workload, spec)
    shards = strategy.expert_shards(experts.router.experts) if experts else strategy.shards(replicas)
    own, stays = 1 / shards, workload.keeps_gradients or (strategy.accumulators_shard and shards > 1)
    owned = not strategy.optimizer_shard or (experts is not None and experts.grouped)
    for size, freed in zip(yields, _freed(workload, spec), strict=False):
        most = max(most, before + HALF_BYTES * size * times - freed)
        if stays:
            gradient = workload.sum_bytes
            cast = HALF_BYTES if gradient != HALF_BYTES else 0
            most = max(most, before + (cast + gradient) * size - freed)
            before += gradient * (own + (replicas > 1)) * size
            most = max(most, before - HALF_BYTES * size - freed)
        has_copy = workload.update.casts_weights or shards > 1
        before -= HALF_BYTES * size * has_copy * (owned or workload.keeps_gradients)
    return most


def _freed(workload: Workload, spec: LayerSpec) -> tuple[float, float, float]:
    """Bytes of results inside a feed-forward part that are gone, but for gradients of such, when each gradient of its weights
    comes: none, that of the product with the gate, all four but for one. Of a joined product at the second all three but for two.
    """
    kept = kept_results(spec, workload.rank_tokens, workload.seq_length, workload.strategy, workload.numerics)
    inner = kept.get(f"{EXPERTS}mul", kept.get("feed_forward.mul", 0.0))
    return 0.0, inner, 3 * inner


def _times_yielded(workload: Workload, spec: LayerSpec) -> float:
    """How often a gradient is there in half precision before it is added up or cast."""
    experts = spec.feed_forward
    if not isinstance(experts, ExpertsSpec):
        return 1.0
    if experts.grouped:
        return 2.0
    tokens, strategy = workload.rank_tokens, workload.strategy
    own = experts.router.experts / strategy.expert_parallel
    sequences = own_places(experts, tokens, workload.seq_length, strategy) / experts.capacity(workload.seq_length) / own
    return sequences + 1 if sequences > 1 else 1.0
