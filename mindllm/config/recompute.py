"""Sections ``recompute_config`` and ``swap_config``: what the backward pass recomputes or loads from host memory."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PlainValidator
from pydantic_core import PydanticCustomError

from mindllm.config.section import WRITTEN_AS_IT_IS, List, PositiveInt, Section

Count = bool | int
LayerCounts = bool | tuple[Count, ...] | tuple[tuple[Count, ...], ...]
LayerSelection = LayerCounts | tuple[str, ...] | dict[str, LayerCounts]
# The same as an editor is told: none of them is empty.
_Row = Annotated[tuple[bool | Annotated[int, Field(ge=0)], ...], Field(min_length=1)]
WrittenCounts = bool | _Row | Annotated[tuple[_Row, ...], Field(min_length=1)]
_Patterns = Annotated[tuple[str, ...], Field(min_length=1)]
WrittenSelection = WrittenCounts | _Patterns | Annotated[dict[str, WrittenCounts], Field(min_length=1)]

COUNTS_FORM = "true, false, a list of layer counts per stage, or a list of such lists per chunk"
SELECTION_FORM = f"{COUNTS_FORM}, or a list of operator patterns, or a mapping of pattern to any of these counts"
LEVEL_SEPARATOR = r"\."
IN_EXPERTS: dict[str, tuple[str, ...]] = {
    r"feed_forward\.mul": (r"feed_forward\.experts\.mul", r"feed_forward\.shared\.mul"),
    r"feed_forward\.w1\.activation\.": (
        r"feed_forward\.experts\.activation\.",
        r"feed_forward\.shared\.w1\.activation\.",
    ),
}
"""How patterns begin that plain counts stand for, and the same in a layer with experts."""


def parse_counts(value: Any) -> LayerCounts:
    """Returns ``value`` with lists as tuples, or raises when it has none of the accepted forms."""
    if isinstance(value, bool):
        return value
    if isinstance(value, list | tuple) and value:
        if all(_is_count(entry) for entry in value):
            return tuple(value)
        if all(isinstance(row, list | tuple) and row and all(map(_is_count, row)) for row in value):
            return tuple(tuple(row) for row in value)
    raise _form_error(COUNTS_FORM)


def parse_selection(value: Any) -> LayerSelection:
    """As :func:`parse_counts`, and also a list of operator patterns or a mapping of pattern to counts."""
    if isinstance(value, dict) and value and all(isinstance(pattern, str) for pattern in value):
        return {_pattern(pattern): parse_counts(counts) for pattern, counts in value.items()}
    if isinstance(value, list | tuple) and value and all(isinstance(entry, str) for entry in value):
        return tuple(map(_pattern, value))
    try:
        return parse_counts(value)
    except PydanticCustomError:
        raise _form_error(SELECTION_FORM) from None


def _is_count(entry: Any) -> bool:
    return isinstance(entry, bool) or (isinstance(entry, int) and entry >= 0)


def _pattern(pattern: str) -> str:
    for level in pattern.split(LEVEL_SEPARATOR):
        try:
            re.compile(level)
        except re.error as error:
            raise PydanticCustomError(
                "pattern", "'{level}' is not a regular expression: {reason}", {"level": level, "reason": str(error)}
            ) from None
    return pattern


def _form_error(form: str) -> PydanticCustomError:
    return PydanticCustomError("form", "must be {form}", {"form": form})


Counts = Annotated[LayerCounts, PlainValidator(parse_counts, json_schema_input_type=WrittenCounts), WRITTEN_AS_IT_IS]
Selection = Annotated[
    LayerSelection, PlainValidator(parse_selection, json_schema_input_type=WrittenSelection), WRITTEN_AS_IT_IS
]


class RecomputeConfig(Section):
    """Section ``recompute_config``: which activations are computed again in the backward pass instead of kept."""

    recompute: Counts = Field(
        default=False,
        description="Whole layers: all, none, the first n of each stage, or the first n of each chunk and stage.",
    )
    select_recompute: Selection = Field(
        default=False,
        description=r"Operators inside layers. Counts stand for `feed_forward\.mul` and `feed_forward\.w1\.activation\..*`, any "
        "activation (MindFormers' own default names SiLU alone); patterns apply to all layers, a mapping to as many as it says.",
    )
    select_comm_recompute: Selection = Field(
        default=False,
        description=r"Operators whose inserted communication is repeated. Forms as `select_recompute`; counts mean `.*\.norm`.",
    )
    select_recompute_exclude: Selection = Field(
        default=False,
        description="Operators kept even inside recomputed layers: patterns, for all layers or with counts.",
    )
    select_comm_recompute_exclude: Selection = Field(
        default=False,
        description="Operators whose communication is not repeated: patterns, for all layers or with counts.",
    )
    parallel_optimizer_comm_recompute: bool = Field(
        default=False, description="Repeats the weight all-gather of the sharded optimizer in recomputed layers."
    )
    mp_comm_recompute: bool = Field(
        default=True, description="Repeats tensor-parallel communication in recomputed layers."
    )
    recompute_slice_activation: bool = Field(
        default=False, description="Shards the kept output of recomputed layers over the tensor-parallel ranks."
    )


def forms_of(pattern: str) -> tuple[str, ...]:
    """A pattern, and the same in a layer with experts."""
    forms = [pattern]
    for start, others in IN_EXPERTS.items():
        if pattern.startswith(start):
            forms += [other + pattern.removeprefix(start) for other in others]
    return tuple(forms)


@lru_cache(maxsize=4096)
def names_operator(pattern: str, path: str) -> bool:
    """Whether a pattern of ``recompute_config`` names the operator at a dotted path of a layer, or a cell around it."""
    parts = path.split(".")
    levels = [form.split(LEVEL_SEPARATOR) for form in forms_of(pattern)]
    return any(len(parts) >= len(form) and all(map(re.fullmatch, form, parts)) for form in levels)


ATTENTION = r"attention\.attention\.flash_attention"
"""What is moved where nothing is named: the results of the fused attention kernel."""


def _one_or_several(value: Any) -> Any:
    return [value] if isinstance(value, dict | str) else value


class LayerSwap(Section):
    """Whole layers, every result of theirs that the backward pass needs."""

    backward_prefetch: PositiveInt = Field(default=1, description="Operators that pass while a result comes back.")
    layers: bool | List[Annotated[int, Field(ge=0)]] = Field(
        default=True, description="Numbers of layers, from 0; true: all of them."
    )

    def holds(self, number: int) -> bool:
        """Whether layer ``number`` is among them."""
        return self.layers if isinstance(self.layers, bool) else number in self.layers


class OperatorSwap(LayerSwap):
    """Operators inside of layers."""

    op_name: Annotated[List[str], BeforeValidator(_one_or_several, json_schema_input_type=str | List[str])] = Field(
        min_length=1, description="Patterns of operators, written as those of `recompute_config`."
    )


LayerSwaps = Annotated[
    List[LayerSwap], BeforeValidator(_one_or_several, json_schema_input_type=LayerSwap | List[LayerSwap])
]
OperatorSwaps = Annotated[
    List[OperatorSwap], BeforeValidator(_one_or_several, json_schema_input_type=OperatorSwap | List[OperatorSwap])
]


class SwapConfig(Section):
    """Section ``swap_config``: results that wait for the backward pass in the memory of the host."""

    swap: bool = Field(default=False, description="Moves results to the host until the backward pass needs them.")
    default_prefetch: PositiveInt = Field(
        default=1, description="`backward_prefetch` of fused attention, which is moved where nothing is named."
    )
    layer_swap: LayerSwaps | None = Field(default=None, description="Whole layers that are moved.")
    op_swap: OperatorSwaps | None = Field(default=None, description="Operators that are moved.")

    def of_layer(self, number: int) -> dict[str, int]:
        """What of layer ``number`` is moved: ``backward_prefetch`` by pattern, that of the whole layer under ``""``."""
        if not self.swap:
            return {}
        if self.layer_swap is None and self.op_swap is None:
            return {ATTENTION: self.default_prefetch}
        found: dict[str, int] = {}
        for one in self.layer_swap or ():
            if one.holds(number):
                found.setdefault("", one.backward_prefetch)
        for operators in self.op_swap or ():
            for pattern in operators.op_name:
                if operators.holds(number):
                    found.setdefault(pattern, operators.backward_prefetch)
        return found

    def numbers(self) -> set[int]:
        """All layers that are named."""
        named = (*(self.layer_swap or ()), *(self.op_swap or ()))
        return {number for one in named if not isinstance(one.layers, bool) for number in one.layers}
