"""The planning problem: layers with their costs, stages with their memory, and the schedule.

Times are in any one unit, memory is in MB. A problem is a JSON file of this form (``Problem.model_json_schema()``);
``read_problem`` reads files of other forms.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, ValidationError, model_validator

from mindllm import outside
from mindllm.architecture.layer_counts import CHUNKS_OF_A_V, IN_PIECES, SEQPIPE, ZERO_BUBBLE_V, places_in_order
from mindllm.config.reading.problems import plain_message
from mindllm.config.section import StrictModel
from mindllm.errors import UserError

Schedule = Literal[
    "1f1b",
    "less_memory",
    "gpipe",
    "seqpipe",
    "seqvpp",
    "seqsmartvpp",
    "zero_bubble_v",
]
"""``1f1b`` is interleaved 1F1B when there are several chunks; ``less_memory`` is the interleaved schedule with the warm-up of one
chunk; ``seqpipe``, ``seqvpp`` and ``seqsmartvpp`` are MindSpore's of pieces of sequences; ``zero_bubble_v`` is its order of two
chunks in a V."""

SHOWN = 40  # digits of an integer in a message
MOST_LAYERS = 4096
MOST_PASSES = 2**20
"""Forward passes of a step that are simulated."""
Amount = Annotated[float, Field(ge=0, le=1e15, allow_inf_nan=False)]  # sums of them stay exact enough to compare
PerStage = Amount | tuple[Amount, ...]
Difference = Annotated[float, Field(ge=-1e15, le=1e15, allow_inf_nan=False)]


class RecomputeKind(StrictModel):
    """The form of a recompute kind in a run YAML: whole layers, or patterns of operators (``true``: the default ones).

    ``swap`` is the ``backward_prefetch`` of fused attention's results, if they wait on the host; 0: they stay on the device.
    """

    recompute: bool = False
    select_recompute: bool | tuple[str, ...] = False
    select_comm_recompute: bool | tuple[str, ...] = False
    swap: int = Field(default=0, ge=0)

    @cached_property
    def marks(self) -> frozenset[str]:
        """The recomputation as a set, to compare kinds."""
        marks = {
            f"{key}:{pattern}"
            for key in ("select_recompute", "select_comm_recompute")
            for pattern in ((getattr(self, key),) if getattr(self, key) is True else getattr(self, key) or ())
        }
        return frozenset({"recompute"} if self.recompute else marks | ({"swap"} if self.swap else set()))

    def includes(self, kind: RecomputeKind) -> bool:
        """Return True if this kind recomputes everything that ``kind`` recomputes."""
        return self.recompute or kind.marks <= self.marks


STANDARD_KINDS = {
    "none": RecomputeKind(),
    "select": RecomputeKind(select_recompute=True),
    "comm": RecomputeKind(select_comm_recompute=True),
    "both": RecomputeKind(select_recompute=True, select_comm_recompute=True),
    "full": RecomputeKind(recompute=True),
}


class KindCost(StrictModel):
    """Costs of a layer under one recompute kind: backward time with recomputation, kept activations, working memory.

    Working memory is needed in the backward pass of the layer. Later layers of the chunk have freed their activations by then.
    """

    backward: Amount
    activation_mb: Amount
    transient_mb: Amount = 0
    again: Amount | None = Field(
        default=None,
        description="Recomputation in backward, repeated by both halves of a backward pass in a V; default: "
        "the time beyond the quickest kind.",
    )


class Layer(StrictModel):
    """A run of ``count`` equal layers."""

    name: str
    count: int = Field(ge=1, le=100_000)
    forward: Amount
    weight_gradient: Amount = Field(default=0, description="Part of backward that a V may put off.")
    parameter_mb: Amount = Field(default=0, description="Parameters, their gradients and optimizer state.")
    start_mb: Difference = Field(
        default=0,
        description="Additional memory when a step starts or ends, without activations; negative: less memory.",
    )
    kinds: Mapping[str, KindCost] = Field(min_length=1)


class End(StrictModel):
    """Costs of the first (embedding) or last (norm, head, loss) place in addition to its layers."""

    forward: Amount = 0
    backward: Amount = 0
    weight_gradient: Amount = 0
    memory_mb: Amount = 0
    activation_mb: Amount = 0


class Tail(End):
    """Costs of the end of the last place; its working memory is needed while all layers keep their activations."""

    transient_mb: Amount = 0


class Problem(StrictModel):
    """A planning problem. Layers stand in model order; a list per stage may be one number for all stages."""

    name: str = "problem"
    stages: int = Field(ge=1, le=1024)
    chunks: int = Field(default=1, ge=1, le=16, description="pp_interleave_num")
    micro_batches: int = Field(ge=1, le=65_536)
    pieces: int = Field(
        default=1, ge=1, le=1024,
        description="seq_split_num: pieces of the sequences of a micro-batch; costs are those of a piece.",
    )  # fmt: skip
    schedule: Schedule = "1f1b"
    layers: tuple[Layer, ...] = Field(min_length=1)
    head: End = End()
    tail: Tail = Tail()
    limit_mb: PerStage | None = None
    static_mb: PerStage = Field(default=0, description="Memory that does not depend on the plan.")
    transient_mb: PerStage = Field(default=0, description="Working memory at the peak.")
    start_mb: Difference | tuple[Difference, ...] = Field(
        default=0,
        description="Memory of a stage without its layers when a step starts; negative: less memory.",
    )
    update_mb: Difference | tuple[Difference, ...] = Field(
        default=0, description="Memory of a stage in addition to parameters while weights are updated."
    )
    recompute_kinds: Mapping[str, RecomputeKind] | None = Field(
        default=None,
        description="YAML form of the kinds; default: the standard names only.",
    )
    point_to_point: Amount = Field(default=0, description="Delay of a tensor between stages.")
    exposed_communication: Amount = Field(default=0, description="Time per step that is not hidden.")

    @model_validator(mode="after")
    def _consistent(self) -> Problem:
        if self.layer_count < self.places:
            raise ValueError(
                f"{self.layer_count} layers cannot fill {self.stages} stages x {self.chunks} chunks: each needs one"
            )
        for key in ("limit_mb", "static_mb", "transient_mb", "start_mb", "update_mb"):
            value = getattr(self, key)
            if isinstance(value, tuple) and len(value) != self.stages:
                raise ValueError(f"{key} has {len(value)} entries for {self.stages} stages")
        if self.v_shape:
            self._check_v()
        if self.layer_count > MOST_LAYERS:
            raise ValueError(f"layers: there are {self.layer_count:,}; at most {MOST_LAYERS:,} are planned")
        if self.pieces > 1:
            self._check_pieces()
        passes = self.places * self.passes
        if passes > MOST_PASSES and not self.settles:
            raise ValueError(
                f"stages x chunks x micro_batches{' x pieces' * (self.pieces > 1)} is {passes:,}: at most {MOST_PASSES:,} passes "
                f"of schedule {self.schedule} are simulated; give fewer micro-batches"
            )
        names = [layer.name for layer in self.layers]
        if len(set(names)) != len(names):
            raise ValueError(f"layers: names must differ, not {names}")
        for layer in self.layers:
            if layer.weight_gradient > min(kind.backward for kind in layer.kinds.values()):
                raise ValueError(f"layers: weight_gradient of {layer.name} is more than its backward")
            if any((kind.again or 0) > kind.backward for kind in layer.kinds.values()):
                raise ValueError(f"layers: again of a kind of {layer.name} is more than its backward")
            for name in layer.kinds:
                if self.recompute_kinds is not None and name not in self.recompute_kinds:
                    raise ValueError(f"layers: kind {name} of {layer.name} is not in recompute_kinds")
        return self

    @cached_property
    def full_activation_mb(self) -> tuple[float, ...]:
        """Activations of a micro-batch that a layer keeps with the least recomputation, by layer."""
        return tuple(max(cost.activation_mb for cost in layer.kinds.values()) for layer in self.layers)

    def _check_pieces(self) -> None:
        """Raise ValueError if MindSpore's orders of pieces do not support these sizes."""
        if self.schedule not in IN_PIECES:
            raise ValueError(
                f"pieces: {self.schedule} orders whole sequences (value {self.pieces}); write 1, or schedule {SEQPIPE}"
            )
        if self.schedule != SEQPIPE and (self.chunks == 1 or self.pieces > self.stages):
            raise ValueError(
                f"pieces: {self.schedule} has several chunks and at most as many pieces as stages, {self.stages} "
                f"(value {self.pieces}, chunks {self.chunks}); write schedule {SEQPIPE}"
            )

    def _check_v(self) -> None:
        """Raise ValueError if MindSpore's order of a V does not fit these sizes."""
        if self.chunks != CHUNKS_OF_A_V:
            raise ValueError(
                f"schedule {self.schedule} has {CHUNKS_OF_A_V} chunks per stage, not {self.chunks}; write chunks "
                f"{CHUNKS_OF_A_V}, or --interleave {CHUNKS_OF_A_V}"
            )
        if self.stages < 2 or self.micro_batches < 2 * self.stages:
            raise ValueError(
                f"schedule {ZERO_BUBBLE_V} needs two stages and two micro-batches per stage at least, not {self.stages} stages "
                f"and {self.micro_batches} micro-batches"
            )
        if not any(layer.weight_gradient for layer in self.layers):
            raise ValueError(f"schedule {self.schedule} puts off weight gradients, but no layer has a weight_gradient")

    @property
    def pipeline(self) -> str:
        """The schedule and its sizes in words."""
        pieces = f" of {self.pieces} pieces" if self.pieces > 1 else ""
        return f"{self.schedule}, {self.stages} stages x {self.chunks} chunk(s), {self.micro_batches} micro-batches{pieces}"

    @property
    def passes(self) -> int:
        """Forward passes of a place in a step: micro-batches, or their pieces."""
        return self.micro_batches * self.pieces

    @property
    def v_shape(self) -> bool:
        """Whether the second chunk runs back from the last stage to the first, with backward passes in two halves."""
        return self.schedule == ZERO_BUBBLE_V

    @property
    def visits(self) -> tuple[int, ...]:
        """The places (chunk x stages + stage) in the order of the model."""
        return _visits(self.stages, self.chunks, self.v_shape)

    @property
    def last_place(self) -> int:
        """The place of the last layer and the tail."""
        return self.visits[-1]

    @property
    def hops(self) -> int:
        """Number of tensors that a micro-batch sends to another stage on its way through all places."""
        stages = [place % self.stages for place in self.visits]
        return sum(stage != following for stage, following in itertools.pairwise(stages))

    def layer_numbers(self, counts: Sequence[int]) -> list[range]:
        """Return the layer numbers of every place from the layer counts by place."""
        numbers, first = [range(0)] * self.places, 0
        for place in self.visits:
            numbers[place] = range(first, first + counts[place])
            first += counts[place]
        return numbers

    @cached_property
    def again(self) -> np.ndarray:
        """Recomputation time in each half of a backward pass in a V, ``[layers, kind_names]``; otherwise zero."""
        times = np.zeros((len(self.layers), len(self.kind_names)))
        for index, layer in enumerate(self.layers if self.v_shape else ()):
            quickest = min(cost.backward for cost in layer.kinds.values())
            for name, cost in layer.kinds.items():
                again = cost.backward - quickest if cost.again is None else cost.again
                times[index, self.kind_names.index(name)] = again
        return times

    @property
    def settles(self) -> bool:
        """Whether more micro-batches only repeat a steady state, so that not all need to be simulated."""
        return self.chunks == 1 and self.schedule == "1f1b"

    @property
    def places(self) -> int:
        """Stages x chunks."""
        return self.stages * self.chunks

    @cached_property
    def layer_count(self) -> int:
        """Layers of all kinds."""
        return sum(layer.count for layer in self.layers)

    @cached_property
    def layer_order(self) -> tuple[int, ...]:
        """Index into ``layers`` of every layer of the model."""
        return tuple(index for index, layer in enumerate(self.layers) for _ in range(layer.count))

    @cached_property
    def kind_names(self) -> tuple[str, ...]:
        """All recompute kinds in the order of their first use."""
        return tuple(dict.fromkeys(name for layer in self.layers for name in layer.kinds))

    @cached_property
    def yaml_kinds(self) -> Mapping[str, RecomputeKind] | None:
        """YAML form of each kind; None if it is unknown for some kind."""
        forms = STANDARD_KINDS if self.recompute_kinds is None else self.recompute_kinds
        return {name: forms[name] for name in self.kind_names} if set(self.kind_names) <= set(forms) else None

    def per_stage(self, key: str) -> tuple[float, ...]:
        """Return a value per stage, such as ``limit_mb``; no limit is infinity."""
        value = getattr(self, key)
        if value is None:
            return (float("inf"),) * self.stages
        return value if isinstance(value, tuple) else (float(value),) * self.stages

    def with_limit(self, limit_mb: float) -> Problem:
        """Return the problem with one limit for all stages."""
        return self.model_copy(update={"limit_mb": limit_mb})


@lru_cache(maxsize=16)
def _visits(stages: int, chunks: int, v_shape: bool) -> tuple[int, ...]:
    return tuple(chunk * stages + stage for chunk, stage in places_in_order(stages, chunks, v_shape))


def make_problem(fields: Mapping[str, Any], source: str) -> Problem:
    """Return a validated problem; UserError names ``source``, the key and the mistake."""
    try:
        return Problem.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if not str(part).startswith(("constrained", "tuple[")))
        raise UserError(f"{source}: {where + ': ' if where else ''}{plain_message(first)}") from None


def shortened(value: Any) -> str:
    """Return the text of a value in a message, shortened; Python cannot convert integers of thousands of digits."""
    if isinstance(value, int) and abs(value) >= 10**SHOWN:
        return f"an integer of more than {SHOWN} digits"
    text = repr(value)
    return text if len(text) <= 2 * SHOWN else text[: 2 * SHOWN] + "…"


def read_json(path: Path) -> Any:
    """Return the content of a JSON file; UserError names the invalid line."""
    try:
        return outside.read_json(path)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
