"""What AdaLoRA and GaLore do in a step beside AdamW, and the optimizer state they keep beside its moments, by layer.

Operators are those of ``optimizers/adalora.py`` and ``optimizers/galore.py``, in single precision, on a rank's part of
of each weight. How long a device takes to factorise or to sort is in no description of one: that is named, not counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mindllm.architecture.adapters import VALUES, A, B
from mindllm.architecture.layer import LayerSpec
from mindllm.architecture.optimizer_state import projected_shapes
from mindllm.architecture.parts import SPLIT_INPUT
from mindllm.architecture.tuners import ADALORA, GALORE, Tuning
from mindllm.timing.costs.layer import WHOLE_ON_A_RANK
from mindllm.timing.costs.work import FP32_BYTES, MATRIX, Axis, Exchange, Operator, Work, elementwise
from mindllm.timing.workload import Strategy, Workload

Cuts = tuple[tuple[Axis, int], ...]
ROUNDS = 16  # of orthogonal iteration (train/projected_matrix.py)
REFRESH_UNCOUNTED = (
    "QR of GaLore's {rounds} rounds for new projections, every {gap} steps (no device's description tells)"
)
ORDER_UNCOUNTED = "the order of AdaLoRA's {scores} scores, every step (no device's description tells)"
# Operators and the tensors that they read and write, of an entry of a weight or of what is named.
COUNTED = (2, 3, 2, 3, 2, 3, 3, 2, 3, 2, 3, 3, 2, 2, 1)  # AdaLoRA: both means of what an entry matters, and its share
CHOSEN = (2, 2, 2, 3, 2, 2, 3, 2, 2)  # AdaLoRA: the values of one adapter
PENALTY = (3, 1, 1, 1, 2)  # AdaLoRA: of an overlap, [rank, rank]
LOW_STEP = (2, 2, 2, 3, 2, 2, 2, 3, 2, 2, 2, 2, 3, 2, 2)  # GaLore: AdamW on a projected gradient
MOVED = (2, 2, 3, 2, 3, 2)  # GaLore: a weight by what was projected back
ROUND = (3,)  # GaLore: beside product and QR


@dataclass(frozen=True)
class Seldom:
    """Work that is done so many ``times`` in a step; less than one: every so many steps."""

    times: float
    work: Work


@dataclass(frozen=True)
class Matrix:
    """A rank's part of a matrix ``[rows, columns]``: how many ways tensor-parallel ranks and replicas cut each side. ``count`` of
    them may be ``stacked``, those of experts.
    """

    name: str
    rows: int
    columns: int
    row_cuts: Cuts
    column_cuts: Cuts
    count: float = 1.0
    stacked: bool = False

    @property
    def own_rows(self) -> float:
        return self.rows / _ways(self.row_cuts)

    @property
    def own_columns(self) -> float:
        return self.columns / _ways(self.column_cuts)

    @property
    def size(self) -> float:
        return self.count * self.own_rows * self.own_columns

    @property
    def is_cut(self) -> bool:
        return bool(self.row_cuts or self.column_cuts)


def matrix_part(name: str, shape: tuple[int, ...], strategy: Strategy) -> Matrix:
    """Of a weight of a layer. Tensor-parallel ranks cut B as they do the output beside it, and A as the input; replicas cut rows
    where they share the optimizer. Of what tensor-parallel ranks do not cut, they are replicas, too.
    """
    split_input = any(f".{module}." in f".{name}" for module in SPLIT_INPUT)
    whole = name.startswith(WHOLE_ON_A_RANK)
    ways = 1 if whole else strategy.model_parallel
    tensor: Cuts = (("tp", ways),) if ways > 1 else ()
    by_rows = () if split_input or name.endswith(f".{A}") else tensor
    axis: Axis = "stage share" if whole else "share"
    replicas = strategy.shards(strategy.stage_device_num if whole else strategy.replica_num)
    shards: Cuts = ((axis, replicas),) if replicas > 1 and not shape[0] // _ways(by_rows) % replicas else ()
    by_columns = tensor if split_input and not name.endswith(f".{B}") else ()
    return Matrix(name, shape[0], shape[1], (*by_rows, *shards), by_columns)


def state_beside(spec: LayerSpec, strategy: Strategy, pet: Tuning | None) -> float:
    """Bytes of optimizer state of a layer beside two moments of each weight a rank updates; below zero where it is less."""
    if pet is None or pet.tuner.name not in (ADALORA, GALORE):
        return 0.0
    if pet.tuner.name == ADALORA:
        return 2.0 * FP32_BYTES * sum(matrix.size for matrix in _adapters(spec, strategy))
    return sum(
        2.0 * FP32_BYTES * (_low(one, pet) - one.size) + FP32_BYTES * _projection(one, pet)
        for one in trained_matrices(spec, strategy)
    )


def projected_size(spec: LayerSpec, strategy: Strategy, pet: Tuning | None) -> float:
    """Numbers of a layer's weights that a rank updates through projections, not by AdamW."""
    if pet is None or pet.tuner.name != GALORE:
        return 0.0
    return sum(matrix.size for matrix in trained_matrices(spec, strategy))


def layer_update(spec: LayerSpec, workload: Workload) -> tuple[Seldom, ...]:
    """What the optimizer does for a layer beside AdamW's update."""
    pet, strategy = workload.architecture.pet, workload.strategy
    if pet is not None and pet.tuner.name == ADALORA:
        return (Seldom(1.0, tuple(_ranks(spec, strategy))),)
    if pet is not None and pet.tuner.name == GALORE:
        matrices = list(trained_matrices(spec, strategy))
        step = tuple(one for matrix in matrices for one in _step(matrix, pet))
        found = tuple(one for matrix in matrices for one in _refresh(matrix, pet))
        return Seldom(1.0, step), Seldom(1.0 / pet.galore_update_proj_gap, found)
    return ()


def step_update(workload: Workload) -> tuple[Seldom, ...]:
    """What every stage does once beside its layers: AdaLoRA's scores of all adapters are added, over all devices."""
    pet = workload.architecture.pet
    if pet is None or pet.tuner.name != ADALORA:
        return ()
    adapters = sum(_values(spec) for spec in workload.architecture.layers)
    size = float(FP32_BYTES * adapters * pet.adalora_init_r)
    of_layers = [len(list(_adapters(spec, workload.strategy))) + _values(spec) for spec in workload.architecture.layers]
    summed = elementwise("adalora.scores", size, float(sum(of_layers) + 1))
    return (Seldom(1.0, (summed, Exchange("adalora.scores", "AllReduce", size, "all"))),)


def uncounted_update(workload: Workload) -> tuple[str, ...]:
    """What takes time in the update that no device's description tells."""
    pet = workload.architecture.pet
    if pet is not None and pet.tuner.name == ADALORA:
        scores = pet.adalora_init_r * sum(_values(spec) for spec in workload.architecture.layers)
        return (ORDER_UNCOUNTED.format(scores=f"{scores:,}"),)
    if pet is not None and pet.tuner.name == GALORE:
        return (REFRESH_UNCOUNTED.format(rounds=ROUNDS, gap=pet.galore_update_proj_gap),)
    return ()


def _ranks(spec: LayerSpec, strategy: Strategy) -> Iterator[Operator | Exchange]:
    """AdaLoRA, of one layer: the gradient of its penalty, both means, the ranks that stay."""
    for one in _adapters(spec, strategy):
        first = one.name.endswith(A)
        rank = one.rows if first else one.columns
        inner = one.own_columns if first else one.own_rows
        cuts = one.column_cuts if first else one.row_cuts
        if first:
            yield from _sums(f"{one.name}.rows", FP32_BYTES * rank * one.own_columns, one.row_cuts)
        yield single_product(f"{one.name}.overlap", rank, inner, rank)
        yield from _sums(f"{one.name}.overlap", float(FP32_BYTES * rank * rank), cuts)
        yield from each(f"{one.name}.penalty", float(rank * rank), PENALTY)
        yield single_product(f"{one.name}.penalty", one.own_rows, rank, one.own_columns)
        yield elementwise(f"{one.name}.gradient", FP32_BYTES * one.size, 3.0)
        yield from each(f"{one.name}.importance", one.size, COUNTED)
    for module, rank in _adapted(spec).items():
        yield from each(f"{module}.{VALUES}.importance", float(rank), COUNTED)
        yield from each(f"{module}.{VALUES}.chosen", float(rank), CHOSEN)


def _step(one: Matrix, pet: Tuning) -> Iterator[Operator | Exchange]:
    """GaLore, of one matrix: to a few dimensions, AdamW there, and back."""
    low, rank, (longer, shorter), cuts = _low(one, pet), pet.galore_rank, _sides(one), _shorter_cuts(one)
    yield elementwise(f"{one.name}.norm", FP32_BYTES * one.size, 1.0)
    yield single_product(f"{one.name}.low", longer, shorter, rank)
    yield from _sums(f"{one.name}.low", FP32_BYTES * low, cuts)
    yield from each(f"{one.name}.step", low, LOW_STEP)
    yield single_product(f"{one.name}.back", longer, rank, shorter)
    yield from each(f"{one.name}.moved", one.size, MOVED)


def _refresh(one: Matrix, pet: Tuning) -> Iterator[Operator | Exchange]:
    """GaLore, of one matrix: a new projection, but for its factorisations."""
    whole, (longer, _) = min(one.rows, one.columns), _sides(one)
    joined = longer * whole
    for axis, _ in _shorter_cuts(one):
        yield Exchange(f"{one.name}.joined", "AllGather", FP32_BYTES * joined, axis)
    yield from each(f"{one.name}.scaled", joined, (2, 1, 2))
    yield single_product(f"{one.name}.square", whole, longer, whole)
    yield from _sums(f"{one.name}.square", float(FP32_BYTES * whole * whole), _longer_cuts(one))
    for _ in range(ROUNDS):
        yield single_product(f"{one.name}.round", whole, whole, pet.galore_rank)
        yield from each(f"{one.name}.round", float(whole * pet.galore_rank), ROUND)


def trained_matrices(spec: LayerSpec, strategy: Strategy) -> Iterator[Matrix]:
    """The trained matrices of a layer."""
    for name, shape in spec.weights().items():
        if len(shape) == 2 and name not in spec.frozen:
            yield matrix_part(name, shape, strategy)


def _adapters(spec: LayerSpec, strategy: Strategy) -> Iterator[Matrix]:
    """A and B of the adapters of a layer."""
    for name, shape in spec.weights().items():
        if name.endswith((f".{A}", f".{B}")):
            yield matrix_part(name, shape, strategy)


def _adapted(spec: LayerSpec) -> dict[str, int]:
    """Ranks by module, of those adapters that share none of another."""
    return {adapter.module: adapter.rank for adapter in spec.adapters if not adapter.first_matrix_of}


def _values(spec: LayerSpec) -> int:
    return len(_adapted(spec))


def _low(one: Matrix, pet: Tuning) -> float:
    """Numbers of a projected gradient on a rank: the longer side is cut as the weight is."""
    return _sides(one)[0] * pet.galore_rank


def _projection(one: Matrix, pet: Tuning) -> float:
    rows, columns = projected_shapes((one.rows, one.columns), pet.galore_rank)[0]
    return float(rows * columns)


def _sides(one: Matrix) -> tuple[float, float]:
    """A rank's part of the longer side of the whole matrix, and of the shorter one."""
    return (one.own_rows, one.own_columns) if one.rows >= one.columns else (one.own_columns, one.own_rows)


def _longer_cuts(one: Matrix) -> Cuts:
    return one.row_cuts if one.rows >= one.columns else one.column_cuts


def _shorter_cuts(one: Matrix) -> Cuts:
    return one.column_cuts if one.rows >= one.columns else one.row_cuts


def _sums(name: str, size: float, cuts: Cuts) -> Iterator[Exchange]:
    for axis, _ in cuts:
        yield Exchange(name, "AllReduce", size, axis)


def each(name: str, size: float, passes: tuple[int, ...]) -> Iterator[Operator]:
    """Yield operators of ``size`` numbers in single precision, one launch each."""
    for count in passes:
        yield elementwise(name, FP32_BYTES * size, float(count))


def single_product(name: str, rows: float, inner: float, columns: float, batch: float = 1.0) -> Operator:
    """Return a product in single precision, or a ``batch`` of them."""
    traffic = FP32_BYTES * batch * (rows * inner + inner * columns + rows * columns)
    return Operator(name, MATRIX, 2.0 * batch * rows * inner * columns, traffic, (rows, inner, columns), "float32")


def _ways(cuts: Cuts) -> int:
    found = 1
    for _, ways in cuts:
        found *= ways
    return found
