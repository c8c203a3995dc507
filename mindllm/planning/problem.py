"""What a pipeline planner has to decide on: layers and what they cost, stages and what they hold, the schedule they run.

Times are in any one unit, memory is in MB. A problem is a JSON file of this form (``Problem.model_json_schema()``); a file of
another form is read by ``read_problem``.
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
    """How a recompute kind is written in a run YAML: whole layers, or patterns of operators (``true``: the default ones).

    ``swap`` is the ``backward_prefetch`` of what fused attention yields, where that waits on the host; 0: it does not.
    """

    recompute: bool = False
    select_recompute: bool | tuple[str, ...] = False
    select_comm_recompute: bool | tuple[str, ...] = False
    swap: int = Field(default=0, ge=0)

    @cached_property
    def marks(self) -> frozenset[str]:
        """What it switches on, so that kinds can be compared; a fully recomputed layer has everything."""
        found = {
            f"{key}:{pattern}"
            for key in ("select_recompute", "select_comm_recompute")
            for pattern in ((getattr(self, key),) if getattr(self, key) is True else getattr(self, key) or ())
        }
        return frozenset({"recompute"} if self.recompute else found | ({"swap"} if self.swap else set()))

    def holds(self, other: RecomputeKind) -> bool:
        """Whether whatever ``other`` recomputes is recomputed by this kind."""
        return self.recompute or other.marks <= self.marks


STANDARD_KINDS = {
    "none": RecomputeKind(),
    "select": RecomputeKind(select_recompute=True),
    "comm": RecomputeKind(select_comm_recompute=True),
    "both": RecomputeKind(select_recompute=True, select_comm_recompute=True),
    "full": RecomputeKind(recompute=True),
}


class KindCost(StrictModel):
    """One layer under one recompute kind: backward time with what is repeated, what it keeps, what it needs for a moment.

    That moment is in its own backward pass: layers behind it in the chunk have freed what they kept of the micro-batch.
    """

    backward: Amount
    activation_mb: Amount
    transient_mb: Amount = 0
    again: Amount | None = Field(
        default=None,
        description="Part of backward that is computed again, by both halves of a backward pass in a V; without it "
        "what backward takes beyond the quickest kind.",
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
        description="Needed beyond that when a step starts, before activations are kept, or when it ends; below zero: less.",
    )
    kinds: Mapping[str, KindCost] = Field(min_length=1)


class End(StrictModel):
    """What the first (embedding) or last (norm, head, loss) place does beside its layers."""

    forward: Amount = 0
    backward: Amount = 0
    weight_gradient: Amount = 0
    memory_mb: Amount = 0
    activation_mb: Amount = 0


class Tail(End):
    """The last place's own part; its working memory is needed while all layers still hold their activations."""

    transient_mb: Amount = 0


class Problem(StrictModel):
    """A planning problem. Layers stand in model order; a list per stage may be one number for all stages."""

    name: str = "problem"
    stages: int = Field(ge=1, le=1024)
    chunks: int = Field(default=1, ge=1, le=16, description="pp_interleave_num")
    micro_batches: int = Field(ge=1, le=65_536)
    pieces: int = Field(
        default=1, ge=1, le=1024,
        description="seq_split_num: in which the sequences of a micro-batch go through the pipeline; costs are those of one.",
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
        description="What a stage needs beside its layers when a step starts; below zero: less of what it has.",
    )
    update_mb: Difference | tuple[Difference, ...] = Field(
        default=0, description="What a stage needs beside parameters while weights are updated, whatever layers it has."
    )
    recompute_kinds: Mapping[str, RecomputeKind] | None = Field(
        default=None,
        description="How kinds are written in YAML; without it the standard names are known, others are not.",
    )
    point_to_point: Amount = Field(default=0, description="Delay of a tensor between stages, beside computation.")
    exposed_communication: Amount = Field(default=0, description="Time per step that nothing hides.")

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
    def whole_mb(self) -> tuple[float, ...]:
        """What a layer keeps of a micro-batch where it recomputes least, by layer."""
        return tuple(max(cost.activation_mb for cost in layer.kinds.values()) for layer in self.layers)

    def _check_pieces(self) -> None:
        """What MindSpore's orders of pieces ask for."""
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
        """The schedule and what it goes through, in words."""
        pieces = f" of {self.pieces} pieces" if self.pieces > 1 else ""
        return f"{self.schedule}, {self.stages} stages x {self.chunks} chunk(s), {self.micro_batches} micro-batches{pieces}"

    @property
    def passes(self) -> int:
        """Forward passes of a place in a step: micro-batches, or pieces of them."""
        return self.micro_batches * self.pieces

    @property
    def v_shape(self) -> bool:
        """Whether the second chunk runs back from the last stage to the first, and backward passes may come in two halves."""
        return self.schedule == ZERO_BUBBLE_V

    @property
    def visits(self) -> tuple[int, ...]:
        """The places (chunk x stages + stage) in the order of the model."""
        return _visits(self.stages, self.chunks, self.v_shape)

    @property
    def last_place(self) -> int:
        """Where the last layer is, and the tail."""
        return self.visits[-1]

    @property
    def hops(self) -> int:
        """Tensors that go to another stage on the way of a micro-batch through all places."""
        stages = [place % self.stages for place in self.visits]
        return sum(here != there for here, there in itertools.pairwise(stages))

    def layer_numbers(self, counts: Sequence[int]) -> list[range]:
        """Numbers of the layers of every place, for numbers of layers by place."""
        found, first = [range(0)] * self.places, 0
        for place in self.visits:
            found[place] = range(first, first + counts[place])
            first += counts[place]
        return found

    @cached_property
    def again(self) -> np.ndarray:
        """Time of what a layer computes again in each half of a backward pass, ``[layers, kind_names]``; else nothing."""
        found = np.zeros((len(self.layers), len(self.kind_names)))
        for index, layer in enumerate(self.layers if self.v_shape else ()):
            quickest = min(cost.backward for cost in layer.kinds.values())
            for name, cost in layer.kinds.items():
                own = cost.backward - quickest if cost.again is None else cost.again
                found[index, self.kind_names.index(name)] = own
        return found

    @property
    def settles(self) -> bool:
        """Whether more micro-batches only repeat a steady state, so that not all of them need be simulated."""
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
        """All recompute kinds, in the order they are first named."""
        return tuple(dict.fromkeys(name for layer in self.layers for name in layer.kinds))

    @cached_property
    def yaml_kinds(self) -> Mapping[str, RecomputeKind] | None:
        """How each kind is written in YAML, or None when that is not known of all of them."""
        known = STANDARD_KINDS if self.recompute_kinds is None else self.recompute_kinds
        return {name: known[name] for name in self.kind_names} if set(self.kind_names) <= set(known) else None

    def per_stage(self, key: str) -> tuple[float, ...]:
        """``limit_mb``, ``static_mb``, ``transient_mb``, ``start_mb`` or ``update_mb`` of every stage; no limit is infinite."""
        value = getattr(self, key)
        if value is None:
            return (float("inf"),) * self.stages
        return value if isinstance(value, tuple) else (float(value),) * self.stages

    def with_limit(self, limit_mb: float) -> Problem:
        """This problem with one limit for all stages."""
        return self.model_copy(update={"limit_mb": limit_mb})


@lru_cache(maxsize=16)
def _visits(stages: int, chunks: int, v_shape: bool) -> tuple[int, ...]:
    return tuple(chunk * stages + stage for chunk, stage in places_in_order(stages, chunks, v_shape))


def make_problem(fields: Mapping[str, Any], source: str) -> Problem:
    """A checked problem; a UserError names ``source``, the key and what is wrong with it."""
    try:
        return Problem.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if not str(part).startswith(("constrained", "tuple[")))
        raise UserError(f"{source}: {where + ': ' if where else ''}{plain_message(first)}") from None


def shortened(value: Any) -> str:
    """A value as a message shows it; an integer of thousands of digits cannot even be written out."""
    if isinstance(value, int) and abs(value) >= 10**SHOWN:
        return f"an integer of more than {SHOWN} digits"
    text = repr(value)
    return text if len(text) <= 2 * SHOWN else text[: 2 * SHOWN] + "…"


def read_json(path: Path) -> Any:
    """The content of a JSON file; a UserError names the line that is none."""
    try:
        return outside.read_json(path)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
