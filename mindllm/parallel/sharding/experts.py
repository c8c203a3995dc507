"""Layouts of a mixture of experts: tokens are routed on their device, sent to the devices of their experts and back.

Sequences are split over data parallel while they are routed and over the replicas of experts while experts work on them, experts
over ``ep``: the compiler exchanges between the two by AlltoAll.
"""

from __future__ import annotations

from mindllm.architecture.parts import ACTIVATION_OPERATORS
from mindllm.models.experts.experts import Dispatch, ExpertFeedForward, ExpertLinear, Experts
from mindllm.models.experts.router import Balance, BestGroups, GroupBalance, Router, Scores
from mindllm.parallel.layout import Dimension, Layout
from mindllm.parallel.sharding.table import Table, on

TOKENS: Dimension = "dp"
SCALAR: Layout = ()
ROUTED: Layout = (TOKENS, None, None)  # [batch, seq, experts] and the like
PER_GROUP: Layout = (TOKENS, None, None, None)
PLACES: Layout = ("replica", "ep", None, None)  # [batch, experts, capacity, hidden]
INNER: Layout = ("replica", "ep", None, "etp")  # [batch, experts, capacity, width]


def routed_experts(at: str, cell: Experts, rows: Dimension) -> Table:
    """Return layouts of all but the shared expert; ``rows``: the split of tokens between the parts of a layer."""
    hidden: Layout = (TOKENS, None, None)
    if cell.grouped:
        return {
            **_router(f"{at}.router", cell.router, rows),
            **_grouped(f"{at}.experts"),
            f"{at}.kept": on(ROUTED, ROUTED),
            **_load(f"{at}.load"),
            **_added(at, cell),
        }
    return {
        **_router(f"{at}.router", cell.router, rows),
        **_dispatch(f"{at}.dispatch", cell.dispatch),
        f"{at}.gather_tokens": on(hidden, hidden),
        f"{at}.depart": on(PLACES, SCALAR),
        **_experts(f"{at}.experts", cell.experts),
        f"{at}.arrive": on(PER_GROUP, SCALAR),
        f"{at}.collect": on(hidden, (TOKENS, None)),
        f"{at}.keep": on(ROUTED, ROUTED),
        f"{at}.weigh": on(PER_GROUP, PER_GROUP),
        f"{at}.sum": on(PER_GROUP),
        **_load(f"{at}.load"),
        **_added(at, cell),
    }


def _load(at: str) -> Table:
    """Return layouts without communication: every sequence is counted on its device."""
    rows: Layout = (TOKENS, None)
    return {
        f"{at}.of_experts": on(ROUTED),
        f"{at}.of_kept": on(ROUTED),
        f"{at}.negative": on(rows, SCALAR),
        f"{at}.dropped": on(rows, SCALAR),
        f"{at}.join": on(rows, rows),
        f"{at}.weigh": on(rows, (None,)),
        f"{at}.sum": on(rows),
    }


def _added(at: str, cell: Experts) -> Table:
    """Return layouts of the losses that sequences add and their zeros, ``[batch]``; ``switch`` is ``[1]``, which is not split."""
    if not cell.balances:
        return {}
    added: Layout = (None,) if cell.router.balance.is_one_number else (TOKENS,)
    return {f"{at}.add_load": on(added, (TOKENS,))}


def _router(at: str, cell: Router, rows: Dimension) -> Table:
    table: Table = {
        f"{at}.matmul": on((rows, None), (None, None)),
        **_scores(f"{at}.scores", cell.scores),
        f"{at}.topk": on(ROUTED),
        f"{at}.pick": on(ROUTED, ROUTED),
        f"{at}.onehot": on(PER_GROUP, SCALAR, SCALAR),
        f"{at}.mark": on(PER_GROUP),
    }
    if cell.has_bias:
        table[f"{at}.bias_add"] = on(ROUTED, (None,))
    if cell.limited:
        table |= _best_groups(f"{at}.groups", cell.groups)
    if cell.renormalises:
        table[f"{at}.total"] = on(ROUTED)
        table[f"{at}.add_tiny"] = on(ROUTED, SCALAR)
        table[f"{at}.divide"] = on(ROUTED, ROUTED)
    if cell.scale != 1.0:
        table[f"{at}.multiply"] = on(ROUTED, SCALAR)
    return table | (_balance(f"{at}.balance", cell.balance) if cell.adds_to_loss else {})


def _scores(at: str, cell: Scores) -> Table:
    return {f"{at}.sigmoid" if cell.by_sigmoid else f"{at}.softmax": on(ROUTED)}


def _best_groups(at: str, cell: BestGroups) -> Table:
    return {
        f"{at}.best_experts": on(PER_GROUP),
        f"{at}.group_sum": on(PER_GROUP),
        f"{at}.best_groups": on(ROUTED),
        f"{at}.onehot": on(PER_GROUP, SCALAR, SCALAR),
        f"{at}.mark": on(PER_GROUP),
        f"{at}.shift": on(ROUTED, SCALAR),
        f"{at}.penalty": on(ROUTED, SCALAR),
        f"{at}.add": on(PER_GROUP, PER_GROUP),
    }


def _balance(at: str, cell: Balance) -> Table:
    """Sequences ``[batch]`` are split like their tokens; ``switch`` needs the sum over all of them, one number per expert."""
    rows: Layout = (TOKENS, None)
    table: Table = {f"{at}.mean_mask": on(ROUTED), f"{at}.mean_score": on(ROUTED)}
    if cell.sigmoid:
        table[f"{at}.score_total"] = on(ROUTED)
        table[f"{at}.score_divide"] = on(ROUTED, ROUTED)
    if cell.of_sequence:
        table[f"{at}.sequence_mul"] = on(rows, rows)
        table[f"{at}.sequence_sum"] = on(rows)
        table[f"{at}.sequence_scale"] = on((TOKENS,), SCALAR)
    if cell.of_all:
        unsplit: Layout = (None, None)
        table[f"{at}.batch_mask"] = on(rows)
        table[f"{at}.batch_score"] = on(rows)
        table[f"{at}.batch_mul"] = on(unsplit, unsplit)
        table[f"{at}.batch_sum"] = on(unsplit)
        table[f"{at}.batch_scale"] = on(unsplit, SCALAR)
    if cell.of_global:
        table[f"{at}.global_mul"] = on(rows, (None,))
        table[f"{at}.global_sum"] = on(rows)
        table[f"{at}.global_scale"] = on((TOKENS,), SCALAR)
    if cell.of_groups:
        table |= _group_balance(f"{at}.group_balance", cell.group_balance)
    if cell.adds_groups:
        table[f"{at}.add_groups"] = on((TOKENS,), (TOKENS,))
    if cell.adds_global:
        table[f"{at}.add_global"] = on((TOKENS,), (TOKENS,))
    if cell.adds_switch:
        table[f"{at}.add_switch"] = on((TOKENS,), (None,))
    if cell.z_loss:
        table |= {f"{at}.{name}": on(ROUTED) for name in ("largest", "exp", "exp_sum", "log", "square", "z_mean")}
        table |= {f"{at}.{name}": on(ROUTED, ROUTED) for name in ("sub", "add_largest")}
        table[f"{at}.z_scale"] = on((TOKENS,), SCALAR)
    if cell.adds_z:
        table[f"{at}.add_z"] = on((TOKENS,), (TOKENS,))
    return table


def _group_balance(at: str, cell: GroupBalance) -> Table:
    """Return layouts of the balance of groups: sequences are split like their tokens, as for experts."""
    rows: Layout = (TOKENS, None)
    table: Table = {f"{at}.group_score": on(ROUTED)}
    for name in ("device",) * bool(cell.device) + ("sent",) * bool(cell.communication):
        table |= {f"{at}.{name}_mul": on(rows, rows), f"{at}.{name}_sum": on(rows)}
        table[f"{at}.{name}_scale"] = on((TOKENS,), SCALAR)
    if cell.device:
        table[f"{at}.group_mask"] = on(ROUTED)
    if cell.communication:
        table |= {f"{at}.any_of_group": on(PER_GROUP), f"{at}.sent": on(ROUTED)}
    if cell.adds_both:
        table[f"{at}.add_both"] = on((TOKENS,), (TOKENS,))
    return table


def _dispatch(at: str, cell: Dispatch) -> Table:
    return {
        f"{at}.transpose": on(ROUTED),
        f"{at}.earlier_first": on(ROUTED, (None, None, None)),
        f"{at}.earliest": on(ROUTED),
        f"{at}.count": on(ROUTED),
        f"{at}.place": on(ROUTED, ROUTED),
        **{f"{at}.{name}": on(ROUTED, SCALAR) for name in ("first_is_zero", "fits", "clip", "of_expert")},
        f"{at}.add": on(ROUTED, ROUTED),
    }


def _grouped(at: str) -> Table:
    """Every device sorts tokens for the experts it has; those of a group of experts have different tokens."""
    tokens: Layout = (("replica", "ep"), None)
    matrices: Layout = ("ep", None, None)
    return {f"{at}.on_parts": on(tokens, tokens, tokens, matrices, matrices, matrices, out=tokens, named=True)}


def _experts(at: str, cell: ExpertFeedForward) -> Table:
    """Return layouts of experts. An expert's width is split over its ranks, and its down projection sums over them."""
    table: Table = {}
    for name, x, weight in (
        ("w1", PLACES, ("ep", "etp", None)),
        ("w3", PLACES, ("ep", "etp", None)),
        ("w2", INNER, ("ep", None, "etp")),
    ):
        linear = getattr(cell, name)
        if not isinstance(linear, ExpertLinear):
            raise TypeError(f"no sharding is known for '{at}.{name}' of class {type(linear).__name__}")
        table[f"{at}.{name}.matmul"] = on(x, weight)
    names = [name for name in ACTIVATION_OPERATORS.values() if hasattr(cell.activation, name)]
    table |= {f"{at}.activation.{name}": on(INNER) for name in names}
    return {**table, f"{at}.mul": on(INNER, INNER)}
