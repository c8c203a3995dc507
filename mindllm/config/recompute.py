"""Sections ``recompute_config`` and ``swap_config``: what the backward pass recomputes or loads from host memory."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PlainValidator
from pydantic_core import PydanticCustomError

from mindllm.config.section import UNCHANGED_SERIALIZER, List, PositiveInt, Section

Count = bool | int
LayerCounts = bool | tuple[Count, ...] | tuple[tuple[Count, ...], ...]
LayerSelection = LayerCounts | tuple[str, ...] | dict[str, LayerCounts]
# The JSON Schema form: lists are not empty.
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
    """Return ``value`` with lists as tuples; raise if it has none of the accepted forms."""
    if isinstance(value, bool):
        return value
    if isinstance(value, list | tuple) and value:
        if all(_is_count(entry) for entry in value):
            return tuple(value)
        if all(isinstance(row, list | tuple) and row and all(map(_is_count, row)) for row in value):
            return tuple(tuple(row) for row in value)
    raise _form_error(COUNTS_FORM)


def parse_selection(value: Any) -> LayerSelection:
    """Return counts like :func:`parse_counts`, a list of operator patterns, or a mapping of pattern to counts."""
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


Counts = Annotated[
    LayerCounts, PlainValidator(parse_counts, json_schema_input_type=WrittenCounts), UNCHANGED_SERIALIZER
]
Selection = Annotated[
    LayerSelection, PlainValidator(parse_selection, json_schema_input_type=WrittenSelection), UNCHANGED_SERIALIZER
]


class RecomputeConfig(Section):
    """Section ``recompute_config``: which activations are computed again in the backward pass instead of kept."""

    recompute: Counts = Field(
        default=False,
        description="Recomputed layers: all, none, the first n of each stage, or the first n of each chunk and stage.",
    )
    select_recompute: Selection = Field(
        default=False,
        description="Recomputed operators of layers. Counts stand for `feed_forward\\.mul` and "
        "`feed_forward\\.w1\\.activation\\..*` with any activation (MindFormers' default has SiLU only). "
        "Patterns apply to all layers, a mapping to the given numbers of layers.",
    )
    select_comm_recompute: Selection = Field(
        default=False,
        description="Operators whose inserted communication is repeated. Forms as in `select_recompute`; counts stand "
        "for `.*\\.norm`.",
    )
    select_recompute_exclude: Selection = Field(
        default=False,
        description="Operators that are not recomputed, even in recomputed layers: patterns, for all layers or with "
        "counts.",
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


def pattern_forms(pattern: str) -> tuple[str, ...]:
    """Return a pattern and its form in layers with experts."""
    forms = [pattern]
    for start, replacements in IN_EXPERTS.items():
        if pattern.startswith(start):
            forms += [replacement + pattern.removeprefix(start) for replacement in replacements]
    return tuple(forms)


@lru_cache(maxsize=4096)
def names_operator(pattern: str, path: str) -> bool:
    """Return True if a pattern of ``recompute_config`` matches the operator at a dotted path of a layer, or a cell around it."""
    parts = path.split(".")
    levels = [form.split(LEVEL_SEPARATOR) for form in pattern_forms(pattern)]
    return any(len(parts) >= len(form) and all(map(re.fullmatch, form, parts)) for form in levels)


ATTENTION = r"attention\.attention\.flash_attention"
"""The default selection: results of the fused attention kernel."""


def _as_sequence(value: Any) -> Any:
    return [value] if isinstance(value, dict | str) else value


class LayerSwap(Section):
    """Layers whose results for the backward pass move to the host."""

    backward_prefetch: PositiveInt = Field(
        default=1, description="Operators between the start of the transfer from the host and the use of the result."
    )
    layers: bool | List[Annotated[int, Field(ge=0)]] = Field(
        default=True, description="Indices of layers, from 0; true: all layers."
    )

    def holds(self, number: int) -> bool:
        """Return True if layer ``number`` is selected."""
        return self.layers if isinstance(self.layers, bool) else number in self.layers


class OperatorSwap(LayerSwap):
    """Operators inside of layers."""

    op_name: Annotated[List[str], BeforeValidator(_as_sequence, json_schema_input_type=str | List[str])] = Field(
        min_length=1, description="Patterns of operators, in the form of `recompute_config`."
    )


LayerSwaps = Annotated[
    List[LayerSwap], BeforeValidator(_as_sequence, json_schema_input_type=LayerSwap | List[LayerSwap])
]
OperatorSwaps = Annotated[
    List[OperatorSwap], BeforeValidator(_as_sequence, json_schema_input_type=OperatorSwap | List[OperatorSwap])
]


class SwapConfig(Section):
    """Section ``swap_config``: results in host memory until the backward pass needs them."""

    swap: bool = Field(default=False, description="Moves results to host memory until the backward pass needs them.")
    default_prefetch: PositiveInt = Field(
        default=1,
        description="`backward_prefetch` of fused attention, which moves if no layers and operators are selected.",
    )
    layer_swap: LayerSwaps | None = Field(default=None, description="Layers whose results move to the host.")
    op_swap: OperatorSwaps | None = Field(default=None, description="Operators whose results move to the host.")

    def of_layer(self, number: int) -> dict[str, int]:
        """Return ``backward_prefetch`` by pattern for layer ``number``. The pattern ``""`` stands for the complete layer."""
        if not self.swap:
            return {}
        if self.layer_swap is None and self.op_swap is None:
            return {ATTENTION: self.default_prefetch}
        prefetch: dict[str, int] = {}
        for layers in self.layer_swap or ():
            if layers.holds(number):
                prefetch.setdefault("", layers.backward_prefetch)
        for operators in self.op_swap or ():
            for pattern in operators.op_name:
                if operators.holds(number):
                    prefetch.setdefault(pattern, operators.backward_prefetch)
        return prefetch

    def numbers(self) -> set[int]:
        """Return all selected layers."""
        named = (*(self.layer_swap or ()), *(self.op_swap or ()))
        return {number for entry in named if not isinstance(entry.layers, bool) for number in entry.layers}
