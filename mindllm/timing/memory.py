"""Memory of a stage by formula: state, what micro-batches keep, working memory.

It prunes and ranks; a dry run has the last word. What a layer keeps is added up operator by operator (``saved_activations.py``);
a fully recomputed layer keeps its input. In its backward pass a layer needs the rest again, and its gradients, when those behind
it have freed theirs. The planner's problem (``planning/costs/formula.py``) is made of the same figures; both add them up in
``schedules/held_memory.py``.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import replace

import numpy as np

from mindllm.architecture.layer import LayerSpec
from mindllm.architecture.parts import AttentionSpec
from mindllm.parallel.layer_plan import LayerAssignment
from mindllm.schedules.held_memory import held_memory, v_working_memory, working_memory
from mindllm.schedules.orders import Orders, alive, stage_orders
from mindllm.schedules.steady import SCHEDULE
from mindllm.timing.costs.coded_update import coded_working_bytes, saved_bytes
from mindllm.timing.costs.layer import WHOLE_ON_A_RANK, forward_work, repeated_work
from mindllm.timing.costs.orthogonal_update import orthogonal_working_bytes
from mindllm.timing.costs.swapped import moved_bytes
from mindllm.timing.costs.work import FP32_BYTES, HALF_BYTES
from mindllm.timing.non_layer_cost import (
    EXPERTS,
    Held,
    coded_numbers,
    embedding_parameters,
    last_parameters,
    layer_parameters,
)
from mindllm.timing.saved_activations import READ_BY, gradients_at_once, kept_results
from mindllm.timing.step_work import layer_key, step_work
from mindllm.timing.weight_memory import (
    before_gradient,
    copied_at_norm,
    gradients_of_weights,
    holds_frozen_in_half,
    kept_of_weights,
    left_by_pass,
    more_at_update,
    own_sizes,
    read_forward,
    scaled_at_update,
    squares_at_norm,
    weights_and_gradients,
    zeros_of_accumulators,
)
from mindllm.timing.workload import Workload

MOMENTS = 2 * FP32_BYTES
CAST_UPDATE = 5 * FP32_BYTES
"""Bytes of a number whose weight is in half precision while it is updated: weight and gradient as they are cast, and what the
update yields of weight and moments before they are stored (``AdamApplyOneWithDecay`` in MindSpore's dry run)."""
COMPRESSED_MASK = 2048 * 2048  # bytes, of sequences of any length
CAPPED_LOGITS = 4 * FP32_BYTES  # of one under a soft cap: the cap's tanh, and three of the cross entropy
MOST_SIMULATED = 4  # micro-batches per stage after which a pipeline holds no more


def stage_bytes(workload: Workload) -> tuple[float, ...]:
    """Peak of every stage, ``[stages]``, without gaps between blocks and kernels' workspace: in a backward pass or the update."""
    plan = workload.plan
    held_for_pieces = np.zeros(plan.stages)  # keys, values and their gradients, from one piece to the next
    for own, spec in zip(plan.layers, workload.architecture.layers, strict=True):
        held_for_pieces[own.stage] += 2 * seen_by_a_piece(workload, spec)
        held_for_pieces[own.stage] -= 0.0 if own.recompute else cast_for_a_piece(workload, spec)
    return tuple(
        state_bytes(update.parameters, workload)
        + max(float(size) + left_of_ends(workload, stage), bytes_at_update(update.parameters, workload))
        + placeholder_bytes(workload, stage)
        + zeros_of_accumulators(workload)
        + float(held_for_pieces[stage])
        for stage, (update, size) in enumerate(zip(step_work(workload).updates, _pass_bytes(workload), strict=True))
    )


def _pass_bytes(workload: Workload) -> np.ndarray:
    """What passes of micro-batches need at their fullest moment, ``[stages]``."""
    plan, orders = workload.plan, _orders(workload)
    layers: list[list[tuple[float, float, float]]] = [[] for _ in range(plan.stages * plan.chunks)]
    left: list[list[float]] = [[] for _ in layers]
    copies = np.zeros(len(layers))  # operands that a backward pass joins from parts when it begins
    kinds, specs = workload.architecture.specification_numbers, workload.architecture.layers
    left_of_kind = {kind: left_of_layer(workload, specs[kind]) for kind in set(kinds)}
    for number, (own, needs, kind) in enumerate(zip(plan.layers, _needs(workload), kinds, strict=True)):
        place = own.chunk * plan.stages + own.stage
        layers[place].append(needs)
        copied = joined_operands(workload, specs[kind], own, number == 0)
        copies[place] += copied
        left[place].append(left_of_kind[kind] - copied)  # freed together with what the layer keeps
    kept = np.array([sum(size for size, _, _ in held) for held in layers])
    kept[0] += kept_of_embedding(workload)
    kept[plan.last_place] += kept_at_the_loss(workload)
    working = np.array([
        v_working_memory(held) if plan.v_shape else working_memory([needs[:2] for needs in held], residues=more)
        for held, more in zip(layers, left, strict=True)
    ])  # fmt: skip
    working += copies
    working[plan.last_place] = max(working[plan.last_place], loss_bytes(workload))
    shape = (plan.chunks, plan.stages)
    held = held_memory(kept.reshape(shape), working.reshape(shape), orders) + np.array(mask_bytes(workload))
    for own, spec in zip(plan.layers, workload.architecture.layers, strict=True):
        if plan.chunks == 1 and len(orders[own.stage]) == 2 * int(alive(orders, 1)[own.stage].max()):  # all at once
            held[own.stage] -= read_forward(workload, spec)
    return held


def joined_operands(workload: Workload, spec: LayerSpec, own: LayerAssignment, first: bool) -> float:
    """Return the bytes that a backward pass needs from its beginning to join the parts of ``fine_grain_interleave``.

    MindSpore computes the gradient of a weight from all rows at once, so it joins the parts of the operand, which is kept, for
    each weight that reads it: queries, keys and values need three copies of one operand. A layer that computes or gathers its
    operands again joins them in its own backward pass.

    Args:
        workload: the run.
        spec: what the layer is made of.
        own: where the layer is and what it recomputes.
        first: whether it is the first layer of the model, whose projections take all rows at once.
    """
    strategy = workload.strategy
    if strategy.row_parts == 1 or own.recompute:
        return 0.0
    operand = HALF_BYTES * workload.rank_tokens * spec.attention.hidden_size
    repeated = {
        one.name
        for one in repeated_work(
            forward_work(spec, float(workload.rank_tokens), workload.seq_length, strategy, workload.numerics), own
        )
        if one.name.endswith("_norm.gather")
    }
    weights, copies = spec.weights(), 0
    for results, readers in READ_BY.items():
        of_first = first and results[0].startswith("attention_norm")
        if len(results) == 2 and not of_first and results[1] not in repeated:
            copies += max(0, sum(f"{reader}.weight" in weights for reader in readers) - 1)
    return copies * operand


def left_of_layer(workload: Workload, spec: LayerSpec) -> float:
    """Bytes of gradients of a layer that a backward pass leaves until it ends."""
    if workload.exchanges_in(spec):
        return 0.0
    held = layer_parameters(spec, workload.strategy, workload.architecture.pet, workload.update)
    return left_by_pass(held, workload)


def left_of_ends(workload: Workload, stage: int) -> float:
    """Bytes of gradients of embedding and head that passes leave on a stage, taken as there all the time."""
    if any(workload.exchanges_in(spec) for spec in workload.architecture.specifications()):
        return 0.0
    first = left_by_pass(embedding_parameters(workload), workload) if stage == 0 else 0.0
    return first + (left_by_pass(last_parameters(workload), workload) if stage == workload.plan.last_stage else 0.0)


def bytes_at_update(held: Held, workload: Workload) -> float:
    """What the update of these parameters needs beside their state: their gradients, and what there is for a moment."""
    at_norm = copied_at_norm(held, workload) + squares_at_norm(workload)
    at_weight = update_working_bytes(workload) + scaled_at_update(held, workload)
    return more_at_update(held, workload) + max(at_weight, at_norm)


def mask_bytes(workload: Workload) -> tuple[float, ...]:
    """Attention masks of every stage in its passes, ``[stages]``: one of each context; between stages every pass has a copy for
    attention's kernel, which keeps it. Rows of documents have masks of their own, and pieces parts of one: they are not counted.
    """
    plan, numerics, architecture = workload.plan, workload.numerics, workload.architecture
    if numerics.whole_masks or not numerics.forms.casts:
        return (0.0,) * plan.stages
    contexts = len(architecture.contexts())
    if not numerics.fused_attention or not all(spec.attention.can_be_fused for spec in architecture.specifications()):
        return (float(FP32_BYTES * workload.seq_length**2 * contexts),) * plan.stages
    size = float(COMPRESSED_MASK * contexts)
    if plan.stages == 1 or workload.strategy.pieces > 1:
        return (size,) * plan.stages
    orders = _orders(workload)
    return tuple(size * (1 + float(max(sum(vector) for vector in held))) for held in alive(orders, plan.chunks))


def _orders(workload: Workload) -> Orders:
    """The operations of every stage, of as many micro-batches as it takes for stages to hold the most; in other orders than 1F1B
    that may grow with every one.
    """
    plan, strategy = workload.plan, workload.strategy
    micro = strategy.micro_batches
    if strategy.schedule == SCHEDULE:
        micro = min(micro, MOST_SIMULATED * plan.stages)
    return stage_orders(strategy.schedule, plan.stages, plan.chunks, micro, strategy.pieces)


def update_working_bytes(workload: Workload) -> float:
    """What a stage needs beside its state while a weight is updated, where that is not one kernel."""
    return max(orthogonal_working_bytes(workload), coded_working_bytes(workload), _cast_working_bytes(workload))


def _cast_working_bytes(workload: Workload) -> float:
    """Return what the update of one weight in half precision needs, of the table or layer that needs most.

    Gradients that are no accumulators, and scaled copies of these, are gone once they are used.
    """
    rule, strategy, architecture = workload.update, workload.strategy, workload.architecture
    if not rule.in_half or rule.master_weights:
        return 0.0
    shards = strategy.shards(strategy.replica_num)
    frees = not workload.accumulates or (shards == 1 and strategy.device_num > 1)
    sizes = [[architecture.vocab_size * architecture.hidden_size / strategy.model_parallel / shards]]
    sizes += [own_sizes(spec, workload) for spec in architecture.specifications()]
    most = 0.0
    for own in sizes:
        used = 0.0
        for size in own:
            used += rule.weight_bytes * size if frees else 0.0
            most = max(most, CAST_UPDATE * size - used)
    return most


def placeholder_bytes(workload: Workload, stage: int) -> float:
    """Of the gradients in half precision that stand for those which products added up themselves: one for each shape.

    Queries, keys and values have one weight, as a gate and what it opens have; of experts every one has the same shape.
    """
    if not workload.numerics.forms.placeholders:
        return 0.0
    plan, architecture, ranks = workload.plan, workload.architecture, workload.strategy.model_parallel
    kinds = {architecture.specification_numbers[at] for at, own in enumerate(plan.layers) if own.stage == stage}
    shapes = {
        (name, shape[-2] * shape[-1] / (1 if name.startswith((*WHOLE_ON_A_RANK, EXPERTS)) else ranks))
        for kind in kinds
        for name, shape in architecture.layers[kind].weights().items()
        if len(shape) > 1
    }
    table = architecture.vocab_size * architecture.hidden_size / ranks if stage == plan.last_stage else 0.0
    return HALF_BYTES * (sum(size for _, size in shapes) + table)


def kept_bytes(workload: Workload) -> tuple[float, ...]:
    """What a micro-batch keeps of every layer on the device, ``[layers]``."""
    return tuple(kept for kept, _, _ in _needs(workload))


def _needs(workload: Workload) -> list[tuple[float, float, float]]:
    """What every layer keeps of a micro-batch on the device, its working memory beside that, and what it would keep if it
    recomputed nothing, ``[layers]``.

    What waits on the host is back when the layer's backward pass needs it.
    """
    found: dict[Hashable, tuple[float, float, float]] = {}
    for number, own in enumerate(workload.plan.layers):
        key = layer_key(workload, number)
        if key not in found:
            spec = workload.architecture.layers[number]
            kept, working = layer_needs(workload, spec, own)
            whole = layer_bytes(workload, spec, LayerAssignment(own.stage), workload.rank_tokens)
            moved = moved_bytes(step_work(workload).parts[key].moved)
            found[key] = kept - moved, working + moved, max(0.0, whole)
    return [found[layer_key(workload, number)] for number in range(len(workload.plan.layers))]


def layer_needs(workload: Workload, spec: LayerSpec, own: LayerAssignment) -> tuple[float, float]:
    """What a micro-batch keeps of one layer, and what its backward pass needs beside that: what is computed again, gradients."""
    tokens = workload.rank_tokens
    if (
        own.recompute and workload.numerics.dropout == "drawn"
    ):  # masks are drawn with all else, and kept as long as that
        workload = replace(workload, numerics=replace(workload.numerics, dropout="kept"))
    kept, whole = (layer_bytes(workload, spec, one, tokens) for one in (own, LayerAssignment(own.stage)))
    of_weights = gradients_of_weights(workload, spec)
    working = whole - kept
    working += gradients_at_once(
        spec, tokens, workload.seq_length, workload.strategy, workload.numerics, of_weights, own.recompute
    )
    return kept, working


def layer_bytes(workload: Workload, spec: LayerSpec, own: LayerAssignment, tokens: int) -> float:
    """What a micro-batch of ``tokens`` tokens keeps of one layer; what is computed again need not be kept. Below zero where the
    only pass of a step frees less than its gradients take (``weight_memory.py``).
    """
    strategy, numerics = workload.strategy, workload.numerics
    given = numerics.hidden_bytes * tokens * spec.attention.hidden_size
    if own.recompute:
        return (
            given / strategy.input_ranks + seen_by_a_piece(workload, spec) + kept_of_weights(workload, spec, again=True)
        )
    kept = kept_results(spec, tokens, workload.seq_length, strategy, numerics)
    if own.patterns:
        forward = forward_work(spec, float(tokens), workload.seq_length, strategy, numerics)
        for one in repeated_work(forward, own):
            kept.pop(one.name, None)
    results = max(given / strategy.sequence_ranks, sum(kept.values())) + seen_by_a_piece(workload, spec)
    return results + cast_for_a_piece(workload, spec) + kept_of_weights(workload, spec)


def seen_by_a_piece(workload: Workload, spec: LayerSpec) -> float:
    """Keys and values of whole sequences, which every piece of them keeps for its gradients; none where sequences are whole."""
    strategy, attention = workload.strategy, spec.attention
    if strategy.pieces == 1 or not isinstance(attention, AttentionSpec):
        return 0.0
    width = attention.num_kv_heads / strategy.model_parallel * (attention.head_dim + attention.value_dim)
    return HALF_BYTES * strategy.micro_batch_size * workload.seq_length * width


def cast_for_a_piece(workload: Workload, spec: LayerSpec) -> float:
    """The matrices of a layer in half precision, which every pass casts anew and keeps, and of which the state has one; none
    where sequences are whole, whose passes are few. In a dry run they were half of what pieces keep.
    """
    if workload.strategy.pieces == 1:
        return 0.0
    shapes = (*spec.attention.matrices().values(), *spec.feed_forward.matrices().values())
    return HALF_BYTES * sum(map(math.prod, shapes)) / workload.strategy.model_parallel


def kept_of_embedding(workload: Workload) -> float:
    """Return the bytes that a micro-batch keeps of the embedding's result beyond the part that a recomputed first layer keeps.

    MindSpore splits the inputs of recomputed layers only where another recomputed layer yields them.
    """
    strategy = workload.strategy
    size = workload.numerics.hidden_bytes * workload.rank_tokens * workload.architecture.hidden_size
    return size / strategy.sequence_ranks - size / strategy.input_ranks


def kept_at_the_loss(workload: Workload) -> float:
    """The head's weight in half precision and logits in single precision, twice, which every piece keeps; as above."""
    strategy, architecture = workload.strategy, workload.architecture
    if strategy.pieces == 1:
        return 0.0
    vocabulary = architecture.vocab_size / strategy.model_parallel
    return vocabulary * (2 * FP32_BYTES * workload.rank_tokens + HALF_BYTES * architecture.hidden_size)


def state_bytes(held: Held, workload: Workload) -> float:
    """Of the parameters a rank holds in a backward pass: weights, moments, accumulators, and weights in half precision that were
    cast for the whole step; where nothing is accumulated, all gradients.

    Frozen ones have no moments and no gradients, and are whole on every replica. Those in codes are matrices only while they are
    multiplied with.
    """
    strategy = workload.strategy
    saved = saved_bytes(coded_numbers(held, strategy), workload.update)
    rule = workload.update
    of_weight = MOMENTS + rule.weight_bytes + FP32_BYTES * rule.master_weights
    trained = held.own(strategy) * of_weight + held.state - saved + weights_and_gradients(held, workload)
    size = FP32_BYTES + (0 if workload.numerics.forms.casts else HALF_BYTES)
    return trained + held.codes + held.frozen * (HALF_BYTES if holds_frozen_in_half(workload) else size)


def loss_bytes(workload: Workload) -> float:
    """Return the bytes that the last place needs while its layers still hold all that they kept: logits, of one slice of several,
    and what the last norm keeps. The gradients of head and embedding, which the state of a step's only pass has, come later.
    """
    architecture, casts = workload.architecture, workload.numerics.forms.casts
    vocabulary = architecture.vocab_size / workload.strategy.model_parallel
    whole = workload.loss_chunks == 1
    heads = 1 + architecture.predictions if whole else 1  # without slices all logits are there at once
    logits = heads * bytes_of_logit(workload) * workload.rank_tokens * vocabulary
    # A step without accumulators keeps the gradient of the head's weight of every slice until it adds them up.
    slices = 0 if whole or not workload.keeps_gradients else workload.loss_chunks
    of_slices = slices * HALF_BYTES * vocabulary * architecture.hidden_size
    head = last_parameters(workload)
    read = HALF_BYTES * head.frozen if casts and not holds_frozen_in_half(workload) else 0.0
    needed = logits / workload.loss_chunks + of_slices + read + before_gradient(head, workload)
    if workload.plan.last_stage == 0:
        embedding = embedding_parameters(workload)  # gathered rows were looked up: what is left is a tied head
        needed += before_gradient(embedding if architecture.head.tied else replace(embedding, made=0.0), workload)
    if casts and whole and workload.keeps_gradients:
        needed += max(0.0, gradient_of_head(workload, head) - logits)
    needed += kept_by_last_norm(workload) if casts else 0.0
    needed += more_in_last_copy(workload) if casts else 0.0
    return max(0.0, needed - left_of_ends(workload, workload.plan.last_stage))  # nothing of a gradient is there yet


def bytes_of_logit(workload: Workload) -> float:
    """Return the bytes of one logit that are there at once in the cross entropy.

    MindSpore has three tensors of the size of the logits: the shifted logits, the one-hot labels, and one more in the loss and in
    its gradient. Of several copies of a micro-batch each has the first two, and one of them has the third.
    """
    if workload.architecture.head.soft_cap is not None:
        return CAPPED_LOGITS
    forms = workload.numerics.forms
    return forms.logit * (2 + 1 / workload.strategy.copies) / 3 if forms.casts else forms.logit


def gradient_of_head(workload: Workload, head: Held) -> float:
    """Return the bytes that the gradient of the head's weight needs at its fullest moment, beside the weight as it was cast.

    It is there as its product yields it, and cast to the type of weights in single precision. The product follows that of the
    hidden states' gradient, when the cast weight is gone, but in dry runs of frozen layers it comes first, next to the gradient
    of logits.
    """
    cast = 0 if workload.update.weight_bytes == HALF_BYTES else workload.update.weight_bytes
    both = (HALF_BYTES + cast) * head.trained
    if workload.architecture.pet is None:
        return both - head.made
    vocabulary = workload.architecture.vocab_size / workload.strategy.model_parallel
    return both + HALF_BYTES * workload.rank_tokens * vocabulary


def more_in_last_copy(workload: Workload) -> float:
    """Return the bytes by which the backward pass of the last copy of a micro-batch needs more than that of the first.

    Gradients of weights are added up when those of all copies are there: until then each copy has its own, in the type of the
    weights. The copies before it have freed what they kept. Return 0.0 where that is more, and for one copy.
    """
    strategy, plan, architecture = workload.strategy, workload.plan, workload.architecture
    if strategy.copies == 1 or plan.stages > 1:
        return 0.0
    trained, kept = last_parameters(workload).trained, kept_by_last_norm(workload)
    for own, spec in zip(plan.layers, architecture.layers, strict=True):
        trained += layer_parameters(spec, strategy, architecture.pet, workload.update).updated
        of_weights = kept_of_weights(workload, spec, again=own.recompute)
        kept += layer_bytes(workload, spec, own, workload.rank_tokens) - of_weights
    kept += 2 * FP32_BYTES * workload.rank_tokens * architecture.vocab_size / strategy.model_parallel
    return max(0.0, (strategy.copies - 1) * (workload.update.weight_bytes * trained - kept / strategy.copies))


def kept_by_last_norm(workload: Workload) -> float:
    """Return the bytes of what the norm behind the last layer is given, in single precision, and of its gathered result.

    The latter is kept for the gradient of the head's weight alone.
    """
    size = float(workload.rank_tokens * workload.architecture.hidden_size)
    trained = last_parameters(workload).trained > 0.0 or workload.architecture.head.tied
    return FP32_BYTES * size / workload.strategy.sequence_ranks + (HALF_BYTES * size if trained else 0.0)
