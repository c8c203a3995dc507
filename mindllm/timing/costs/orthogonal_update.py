"""What Muon does in a step instead of AdamW, what it keeps, and the memory that it needs for a moment, by layer.

Operators are those of ``optimizers/muon.py`` in single precision. A device puts a whole matrix together and makes it orthogonal
by itself: that work is not shared. All else is done on its part. Of stacked experts a device has some, among which are those that
replicas share with the optimizer's state; matrices of others it does not need.
"""

from __future__ import annotations

from collections.abc import Iterator

from mindllm.architecture.layer import LayerSpec
from mindllm.architecture.optimizer_state import MUON
from mindllm.architecture.parts import SPLIT_INPUT
from mindllm.architecture.query_key_rows import rows_of_attention
from mindllm.timing.costs.tuned_update import Cuts, Matrix, Seldom, each, single_product, trained_matrices
from mindllm.timing.costs.work import FP32_BYTES, HALF_BYTES, Axis, Exchange, Operator, Work, elementwise
from mindllm.timing.workload import Strategy, UpdateRule, Workload

STACKED = 3  # dimensions of a weight that has the matrices of all experts
# Tensors that operators read and write, of an entry of what is named.
MOMENTUM = (2, 2, 3)  # the scaled gradient, what stays of the momentum, their sum
NESTEROV = (2, 3)  # gradient and momentum
LENGTH = (2, 1, 2)  # squares and their sum, of the whole matrix, and its quotient by the root
POLYNOMIAL = (2, 2, 3)  # b times a square, c times its square, their sum
ADDED = (2, 3)  # a times the matrix, and the product with the polynomial
MOVED = (2, 2, 3, 3, 2, 2)  # what decays, the step, both differences; weight and momentum are written
SCALARS = (2, 3, 2, 2, 2, 2)  # root of the length, a little more, its reciprocal; the rate times decay and scale


def orthogonal_size(spec: LayerSpec, strategy: Strategy, rule: UpdateRule) -> float:
    """Numbers of a layer's weights that a rank updates by Muon, and keeps one moment of."""
    return sum(one.size for one in _matrices(spec, strategy, rule))


def orthogonal_update(spec: LayerSpec, workload: Workload) -> tuple[Seldom, ...]:
    """The update of a layer's matrices, once per step."""
    rule = workload.update
    scaled = frozenset(f"attention.{name}" for name in rows_of_attention(spec.attention)) if rule.scales_heads else ()
    matrices = _matrices(spec, workload.strategy, rule)
    work = tuple(one for matrix in matrices for one in _update(matrix, rule, matrix.name in scaled))
    return (Seldom(1.0, work),) if work else ()


def orthogonal_working_bytes(workload: Workload) -> float:
    """What a stage needs beside its state while it updates a matrix, of the layer where that is most.

    Matrices are updated one after the other. There are the momentum's part, the whole matrix, ``a`` times it, and either its
    product with the polynomial beside that, or three squares of its shorter side. Gradients that are no accumulators are gone
    once they are used: of the first layer of a stage, where those of the others are still there.
    """
    strategy, rule = workload.strategy, workload.update
    most = 0.0
    for spec in workload.architecture.specifications():
        used = 0.0
        for one in _matrices(spec, strategy, rule):
            used += one.size if _has_a_gradient(one, spec, workload) else 0.0
            whole, square = one.count * one.rows * one.columns, one.count * min(one.rows, one.columns) ** 2
            most = max(most, one.size + 2.0 * whole + max(whole + square, 3.0 * square) - used)
    return FP32_BYTES * most


def _has_a_gradient(one: Matrix, spec: LayerSpec, workload: Workload) -> bool:
    """Whether its gradient is a tensor of its own: nothing is accumulated, or replicas get parts of what is."""
    strategy = workload.strategy
    if not workload.accumulates:
        return True
    if strategy.accumulators_shard:
        return False
    if one.stacked:
        return strategy.expert_shards(spec.weights()[one.name][0]) > 1
    return strategy.shards(strategy.replica_num) > 1


def _matrices(spec: LayerSpec, strategy: Strategy, rule: UpdateRule) -> Iterator[Matrix]:
    """The matrices of a layer that Muon updates."""
    if rule.type == MUON:
        yield from trained_matrices(spec, strategy)
        yield from _of_experts(spec, strategy)


def _of_experts(spec: LayerSpec, strategy: Strategy) -> Iterator[Matrix]:
    """Stacks of the matrices of a rank's experts, whose width their tensor-parallel ranks share."""
    ranks = strategy.expert_tensor_parallel
    cuts: Cuts = (("etp", ranks),) if ranks > 1 else ()
    for name, shape in spec.weights().items():
        if len(shape) == STACKED and name not in spec.frozen:
            experts, rows, columns = shape
            by_columns = any(f".{module}." in name for module in SPLIT_INPUT)
            own = experts / strategy.expert_parallel / strategy.expert_shards(experts)
            yield Matrix(name, rows, columns, () if by_columns else cuts, cuts if by_columns else (), own, True)


def _update(one: Matrix, rule: UpdateRule, scaled: bool) -> Work:
    """One matrix: momentum, the whole matrix, its Newton-Schulz steps, the weight, whose heads may be scaled."""
    return (
        elementwise(f"{one.name}.norm", (FP32_BYTES + HALF_BYTES) * one.size, 1.0),  # and its copy in half precision
        *each(f"{one.name}.momentum", one.size, MOMENTUM + (NESTEROV if rule.nesterov else ())),
        *_joined(one),
        *each(f"{one.name}.length", one.count * one.rows * one.columns, LENGTH),
        *each(f"{one.name}.length", one.count, SCALARS),
        *(tuple(_step(one)) * rule.ns_steps),
        *each(f"{one.name}.moved", one.size, (2, *MOVED) if one.is_cut else MOVED),
        *each(f"{one.name}.heads", one.size, (2,) if scaled else ()),
    )


def _joined(one: Matrix) -> Iterator[Operator | Exchange]:
    """The whole matrix out of its parts: columns first, which are turned to be rows for that, then rows. Either side of stacked
    matrices is turned to be in front of them.
    """
    if one.column_cuts:
        ((axis, _),) = one.column_cuts
        yield from _gathered(f"{one.name}.columns", one.size, one.count * one.own_rows * one.columns, axis, turned=True)
    if one.row_cuts:
        whole = one.count * one.rows * one.columns
        yield from _gathered(f"{one.name}.rows", one.size, whole, _rows_axis(one), turned=one.stacked)


def _gathered(name: str, part: float, whole: float, axis: Axis, turned: bool) -> Iterator[Operator | Exchange]:
    """Numbers of a ``part`` and of what it belongs to."""
    if turned:
        yield elementwise(f"{name}.turned", FP32_BYTES * part, 2.0)
    yield Exchange(name, "AllGather", FP32_BYTES * whole, axis)
    if turned:
        yield elementwise(f"{name}.turned", FP32_BYTES * whole, 2.0)


def _rows_axis(one: Matrix) -> Axis:
    """Ranks that have the parts of its rows: tensor-parallel ones, those that share the optimizer's state, or both."""
    axes = {axis for axis, _ in one.row_cuts}
    return "tp and share" if len(axes) > 1 else next(iter(axes))


def _step(one: Matrix) -> Iterator[Operator]:
    """A Newton-Schulz step: the square of the shorter side, its square, and the polynomial of both times the matrix."""
    longer, shorter = float(max(one.rows, one.columns)), float(min(one.rows, one.columns))
    yield single_product(f"{one.name}.square", shorter, longer, shorter, one.count)
    yield single_product(f"{one.name}.fourth", shorter, shorter, shorter, one.count)
    yield from each(f"{one.name}.polynomial", one.count * shorter * shorter, POLYNOMIAL)
    yield single_product(f"{one.name}.times", shorter, shorter, longer, one.count)
    yield from each(f"{one.name}.added", one.count * shorter * longer, ADDED)
