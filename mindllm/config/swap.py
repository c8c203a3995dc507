r"""Section ``swap_config``: what waits for the backward pass in the memory of the host; the keys are MindFormers'.

An operator's result is moved away when it has been used and comes back some operators before the backward pass needs it.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from mindllm.config.section import List, PositiveInt, Section

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
