"""Memory of a stage by formula: state, what micro-batches keep, logits. It prunes and ranks; a dry run has the last word.

What a layer keeps follows Korthikanti et al. (2022, section 4) operator by operator: inputs of products, of norms and of
activations. A fully recomputed layer keeps its input, and one layer at a time keeps everything again.
"""

from __future__ import annotations

from mindllm.config.layers import LayerSpec
from mindllm.parallel.layer_plan import LayerAssignment
from mindllm.planning.schedules.orders import alive, stage_orders
from mindllm.timing.ends import Held
from mindllm.timing.layer import dense, forward_work, repeated_work
from mindllm.timing.step_work import layer_key, step_work
from mindllm.timing.work import HALF, WHOLE, Operator
from mindllm.timing.workload import Strategy, Workload

STATE = 3 * WHOLE  # weight and two moments
LOGITS = 2 * WHOLE + HALF  # of a logit: in single precision, its gradient, and as the product yields it
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
    """What a micro-batch keeps of every layer, ``[layers]``."""
    sizes: dict[object, float] = {}
    tokens = workload.strategy.micro_batch_size * workload.seq_length
    for number, own in enumerate(workload.plan.layers):
        key = layer_key(workload, number)
        if key not in sizes:
            sizes[key] = layer_bytes(workload, workload.architecture.layers[number], own, tokens)
    return tuple(sizes[layer_key(workload, number)] for number in range(len(workload.plan.layers)))


def layer_bytes(workload: Workload, spec: LayerSpec, own: LayerAssignment, tokens: int) -> float:
    """What a micro-batch of ``tokens`` tokens keeps of one layer."""
    strategy, hidden = workload.strategy, spec.attention.hidden_size
    outside = strategy.model_parallel if strategy.sequence_parallel else 1
    if own.recompute:
        return HALF * tokens * hidden / outside
    attention, inner = spec.attention, dense(spec)
    heads = (2 * attention.num_heads + 2 * attention.kv_heads) * attention.head_dim  # query, context, key, value
    widths = (4 if inner.gated else 2) * inner.width
    whole = HALF * tokens * (4 * hidden / outside + (heads + widths) / strategy.model_parallel)
    if not (workload.numerics.fused_attention and attention.can_be_fused):
        whole += 2 * HALF * tokens * workload.seq_length * attention.num_heads / strategy.model_parallel
    return max(HALF * tokens * hidden / outside, whole - _again(workload, own, tokens, spec))


def _again(workload: Workload, own: LayerAssignment, tokens: int, spec: LayerSpec) -> float:
    """What need not be kept because it is computed again: the results of selected operators."""
    if not own.patterns:
        return 0.0
    forward = forward_work(spec, float(tokens), workload.seq_length, workload.strategy, workload.numerics)
    names = {one.name for one in repeated_work(forward, own) if isinstance(one, Operator)}
    strategy, inner, hidden = workload.strategy, dense(spec), spec.attention.hidden_size
    ranks, outside = strategy.model_parallel, strategy.model_parallel if strategy.sequence_parallel else 1
    widths = {
        "feed_forward.mul": inner.width / ranks,
        f"feed_forward.w1.activation.{inner.activation}": inner.width / ranks,
    }
    widths |= {f"{norm}.norm": hidden / outside for norm in spec.norms}
    return HALF * tokens * sum(width for name, width in widths.items() if name in names)


def state_bytes(held: Held, workload: Workload) -> float:
    """Of the parameters a rank holds: weights, moments, gradients, and the weights in half precision that products read.

    Frozen ones have no moments and no gradients, and are whole on every replica.
    """
    strategy, parameters = workload.strategy, held.trained
    own = parameters / (strategy.data_parallel if strategy.optimizer_shard else 1)
    accumulates = strategy.micro_batches * strategy.accumulation > 1
    trained = own * STATE + parameters * (HALF + (WHOLE if accumulates else HALF))
    return trained + held.frozen * (WHOLE + HALF)


def _working(workload: Workload, stage: int) -> float:
    """The most that is needed for a moment: one layer computed again, or the logits of the last stage."""
    strategy: Strategy = workload.strategy
    tokens = strategy.micro_batch_size * workload.seq_length
    layers = [own for own in workload.plan.layers if own.stage == stage and own.recompute]
    again = 0.0
    if layers:
        spec = workload.architecture.layers[workload.plan.layers.index(layers[0])]
        again = layer_bytes(workload, spec, LayerAssignment(stage), tokens)
    if stage == workload.plan.stages - 1:
        again = max(again, LOGITS * tokens * workload.architecture.vocab_size / strategy.model_parallel)
    return again
