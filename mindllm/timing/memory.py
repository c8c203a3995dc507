"""Memory of a stage by formula: state, what micro-batches keep, logits. It prunes and ranks; a dry run has the last word.

What a layer keeps is added up operator by operator (``kept.py``). A fully recomputed layer keeps its input, and one
layer at a time keeps everything again.
"""

from __future__ import annotations

from mindllm.config.layers import LayerSpec
from mindllm.parallel.layer_plan import LayerAssignment
from mindllm.planning.schedules.orders import alive, stage_orders
from mindllm.timing.ends import Held
from mindllm.timing.kept import kept_results
from mindllm.timing.layer import forward_work, repeated_work
from mindllm.timing.step_work import layer_key, step_work
from mindllm.timing.swapped import moved_bytes
from mindllm.timing.work import HALF, WHOLE, Operator
from mindllm.timing.workload import Workload

STATE = 3 * WHOLE  # weight and two moments
LOGITS = (
    4 * WHOLE + HALF
)  # of a logit: as the product yields it, and what a dry run has of it in single precision at once
MOST_SIMULATED = 4  # micro-batches per stage after which a pipeline holds no more


def stage_bytes(workload: Workload) -> tuple[float, ...]:
    """Peak of every stage, ``[stages]``, without gaps between blocks and kernels' workspace."""
    plan, strategy = workload.plan, workload.strategy
    micro = min(strategy.micro_batches, MOST_SIMULATED * plan.stages)
    orders = stage_orders("1f1b", plan.stages, plan.chunks, micro)
    work, found = step_work(workload), []
    kept = kept_bytes(workload)
    for stage, vectors in enumerate(alive(orders, plan.chunks)):
        own = [sum(kept[n] for n, layer in enumerate(plan.layers) if (layer.stage, layer.chunk) == (stage, chunk))
               for chunk in range(plan.chunks)]  # fmt: skip
        held = max(sum(count * size for count, size in zip(vector.tolist(), own, strict=True)) for vector in vectors)
        found.append(state_bytes(work.updates[stage].parameters, workload) + held + _working(workload, stage))
    return tuple(found)


def kept_bytes(workload: Workload) -> tuple[float, ...]:
    """What a micro-batch keeps of every layer on the device, ``[layers]``."""
    sizes: dict[object, float] = {}
    for number, own in enumerate(workload.plan.layers):
        key = layer_key(workload, number)
        if key not in sizes:
            whole = layer_bytes(workload, workload.architecture.layers[number], own, workload.rank_tokens)
            sizes[key] = whole - moved_bytes(step_work(workload).parts[key].moved)
    return tuple(sizes[layer_key(workload, number)] for number in range(len(workload.plan.layers)))


def layer_bytes(workload: Workload, spec: LayerSpec, own: LayerAssignment, tokens: int) -> float:
    """What a micro-batch of ``tokens`` tokens keeps of one layer; what is computed again need not be kept."""
    strategy, numerics = workload.strategy, workload.numerics
    given = HALF * tokens * spec.attention.hidden_size / strategy.sequence_ranks
    if own.recompute:
        return given
    kept = kept_results(spec, tokens, workload.seq_length, strategy, numerics)
    if own.patterns:
        forward = forward_work(spec, float(tokens), workload.seq_length, strategy, numerics)
        for one in repeated_work(forward, own):
            if isinstance(one, Operator):
                kept.pop(one.name, None)
    return max(given, sum(kept.values()))


def state_bytes(held: Held, workload: Workload) -> float:
    """Of the parameters a rank holds: weights, moments, gradients, and the weights in half precision that products read.

    Frozen ones have no moments and no gradients, and are whole on every replica; in half precision they are what products read.
    """
    strategy, pet = workload.strategy, workload.architecture.pet
    accumulates = strategy.micro_batches * strategy.accumulation > 1
    trained = held.own(strategy) * STATE + held.updated * (HALF + (WHOLE if accumulates else HALF))
    in_half = pet is not None and pet.frozen_dtype != "float32"
    return trained + held.frozen * (HALF if in_half else WHOLE + HALF)


def _working(workload: Workload, stage: int) -> float:
    """The most that is needed for a moment: one layer computed again, or the logits of the last stage."""
    strategy, plan = workload.strategy, workload.plan
    tokens = workload.rank_tokens
    layers, kinds = workload.architecture.layers, workload.architecture.kind_numbers
    recomputed = {kind for kind, own in zip(kinds, plan.layers, strict=True) if own.stage == stage and own.recompute}
    again = max(
        (layer_bytes(workload, layers[kind], LayerAssignment(stage), tokens) for kind in recomputed), default=0.0
    )
    if stage == plan.stages - 1:
        whole = workload.loss_chunks == 1
        heads = 1 + workload.architecture.predictions if whole else 1  # without slices all logits are there at once
        logits = heads * LOGITS * tokens * workload.architecture.vocab_size / strategy.model_parallel
        slices = 0 if whole else workload.loss_chunks  # each has a gradient of the head's weight until all are added up
        table = workload.architecture.vocab_size * workload.architecture.hidden_size / strategy.model_parallel
        again = max(again, logits / workload.loss_chunks + slices * HALF * table)
    return again
