"""Results that wait on the host until the backward pass needs them (``swap_config``): their bytes, and what their copies delay.

Copies run on a stream of their own. A pass waits for what they take longer than it; a backward pass also for what of a result is
not back when it is needed: it is called back a few operators before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mindllm.architecture.layer import LayerSpec
from mindllm.architecture.parts import AttentionSpec, LatentAttentionSpec
from mindllm.axes import CONTEXT
from mindllm.config.recompute import names_operator
from mindllm.errors import UserError
from mindllm.parallel.layer_plan import LayerAssignment
from mindllm.timing.costs.work import HALF_BYTES, Operator, Work
from mindllm.timing.saved_activations import kept_results
from mindllm.timing.workload import Swap, Workload

KERNEL = "attention.attention.flash_attention"
HEADS = ("attention.wq", "attention.wk", "attention.wv", KERNEL)


@dataclass(frozen=True)
class Moved:
    """A result of ``bytes`` that is called back ``ahead`` operators before the backward pass needs it."""

    bytes: float
    ahead: int


def moved_results(
    workload: Workload, spec: LayerSpec, own: LayerAssignment, swap: Swap, forward: Work
) -> tuple[Moved, ...]:
    """What a micro-batch moves of a layer, whose operators are ``forward``.

    Raises:
        UserError: nothing that the layer keeps is named, as far as the model of time knows.
    """
    if not swap:
        return ()
    if own.recompute:
        raise UserError(
            "swap_config names a layer that is recomputed as a whole, and keeps nothing that could be moved"
        )
    kept = _kept(workload, spec, forward)
    found: dict[str, int] = {}
    for pattern, ahead in swap:
        names = [name for name in kept if _names(pattern, name)]
        if not names:
            message = f"swap_config names '{pattern}', of whose results the model of time knows none that a layer keeps"
            raise UserError(f"{message}; it knows {', '.join(kept)}")
        for name in names:
            found.setdefault(name, ahead)
    return tuple(Moved(kept[name], ahead) for name, ahead in found.items())


def _kept(workload: Workload, spec: LayerSpec, forward: Work) -> dict[str, float]:
    """Bytes of results by the operator that yields them, as far as one is known; the others under names of their own."""
    strategy, tokens = workload.strategy, workload.rank_tokens
    found = kept_results(spec, tokens, workload.seq_length, strategy, workload.numerics)
    heads = HEADS if isinstance(spec.attention, AttentionSpec) else (KERNEL,)
    for one in forward:
        name = one.name.removesuffix(".matmul")
        if isinstance(one, Operator) and (name in heads):
            found[one.name] = _of_heads(workload, spec, name)
            found["attention.heads"] -= found[one.name]
        elif name in found:
            found[one.name] = found.pop(name)
    return {name: size for name, size in found.items() if size > 0}


def _of_heads(workload: Workload, spec: LayerSpec, name: str) -> float:
    """Bytes that the formula of memory counts together as attention's heads: queries, keys, values and the kernel's result."""
    strategy, attention = workload.strategy, spec.attention
    size = HALF_BYTES * workload.rank_tokens * attention.num_heads / strategy.model_parallel
    if isinstance(attention, LatentAttentionSpec):
        return size * attention.head_dim  # the kernel has values as wide as keys
    if name in ("attention.wk", "attention.wv"):
        gathered = 1 if strategy.exchanges_heads else strategy.size(CONTEXT)
        size *= gathered * attention.num_kv_heads / attention.num_heads
    return size * attention.head_dim


def _names(pattern: str, name: str) -> bool:
    return not pattern or names_operator(pattern, name)


def moved_bytes(moved: Sequence[Moved]) -> float:
    """Bytes of all results."""
    return sum(one.bytes for one in moved)


def late_seconds(moved: Sequence[Moved], rate: float, operator: float) -> float:
    """Seconds that results come late where ``rate`` bytes a second come back and an operator takes ``operator`` seconds."""
    return sum(max(0.0, one.bytes / rate - one.ahead * operator) for one in moved)
