"""What the projections of a model meet when it reads a text: for each input the sum of ``x xᵀ``, and the mean of ``|x|``.

The layers run one after the other, so that what is changed in one of them (its weights, once they are rounded) is seen by those
behind it. Operators run one at a time, in MindSpore's PyNative mode: nothing is compiled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from mindllm.config import ModelConfig
from mindllm.models import build_model
from mindllm.models.linear import Linear
from mindllm.models.weights import assign, trained_weights
from mindllm.train.checkpoint.tensors import TensorSource


@dataclass
class Inputs:
    """Of what one projection, or several that share it, multiplies: ``[in, in]`` and ``[in]``."""

    products: np.ndarray
    magnitudes: np.ndarray
    tokens: int = 0

    @classmethod
    def none(cls, width: int) -> Inputs:
        """Before anything was seen."""
        return cls(np.zeros((width, width)), np.zeros(width))

    def add(self, x: np.ndarray) -> None:
        """Counts ``x`` ``[tokens, in]``."""
        self.products += x.T @ x
        self.magnitudes += np.abs(x).sum(0)
        self.tokens += len(x)

    def divide(self, factors: np.ndarray) -> None:
        """They are smaller by ``factors`` ``[in]`` from now on."""
        self.products /= np.outer(factors, factors)
        self.magnitudes /= factors

    @property
    def mean_magnitudes(self) -> np.ndarray:
        """Means of ``|x|``."""
        return self.magnitudes / max(1, self.tokens)


@dataclass
class LayerByLayer:
    """A model that reads ``rows`` of tokens, int ``[rows, seq]``, a layer at a time."""

    model: ModelConfig
    weights: Mapping[str, TensorSource]
    rows: np.ndarray

    def layers(self, modules: tuple[str, ...]) -> Iterator[tuple[int, dict[str, Inputs]]]:
        """Every layer with what its projections ``modules`` meet; it goes on to the next one with the weights it has then."""
        mode = ms.get_context("mode")
        ms.set_device("CPU")
        ms.set_context(mode=ms.PYNATIVE_MODE)
        try:
            yield from self._layers(modules)
        finally:
            ms.set_context(mode=mode)

    def _layers(self, modules: tuple[str, ...]) -> Iterator[tuple[int, dict[str, Inputs]]]:
        self.lm = build_model(self.model)
        self.lm.set_train(False)
        assign(trained_weights(self.lm), self.weights)
        tokens = (Tensor(row[None].astype(np.int32)) for row in self.rows)
        hidden = [self.lm.model.embedded(row, 1, None) for row in tokens]
        for number in range(self.model.num_layers):
            seen: dict[str, Inputs] = {}
            handles = [_watch(self.lm.model.layers[number], module, seen) for module in modules]
            self._run(number, hidden)
            for handle in handles:
                handle.remove()
            yield number, seen
            hidden = self._run(number, hidden)

    def change(self, changed: Mapping[str, np.ndarray]) -> None:
        """Gives weights other values."""
        own = trained_weights(self.lm)
        assign({name: own[name] for name in changed}, changed)

    def _run(self, number: int, hidden: list[Tensor]) -> list[Tensor]:
        decoder = self.lm.model
        tables, mask = decoder.tables[0](decoder.context_of_layer[number])
        return [decoder.layers[number](x, 1, tables, mask) for x in hidden]


def _watch(layer: nn.Cell, module: str, seen: dict[str, Inputs]):
    cell = layer
    for name in module.split("."):
        cell = getattr(cell, name)
    assert isinstance(cell, Linear)
    seen[module] = Inputs.none(cell.weight.shape[1])

    def count(_: nn.Cell, inputs: tuple[Tensor, ...]) -> None:
        seen[module].add(inputs[0].asnumpy().astype(np.float64))

    return cell.register_forward_pre_hook(count)
