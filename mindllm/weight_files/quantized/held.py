"""What a model is given of projections that it holds in codes: the codes of the files, or weights rounded to codes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mindllm.architecture.adapters import WEIGHT
from mindllm.architecture.quantization import CODES, COLUMNS, CodeSpec
from mindllm.config import ModelConfig
from mindllm.errors import UserError
from mindllm.quantize.packed import held_tensors, rounded
from mindllm.train.checkpoint.tensors import Converted, TensorSource
from mindllm.weight_files.family_weights import Lazy
from mindllm.weight_files.quantized.directory import QuantizedMatrix


def packed_weights(model: ModelConfig, weights: Mapping[str, TensorSource]) -> dict[str, TensorSource]:
    """``weights`` with the tensors of codes in the place of those that ``model`` holds so; none is read yet."""
    found = dict(weights)
    for number, layer in enumerate(model.architecture.layers):
        for spec in layer.codes:
            path = f"model.layers.{number}.{spec.module}"
            if f"{path}{WEIGHT}" in found:
                found |= _parts(path, spec, found.pop(f"{path}{WEIGHT}"))
    return found


def _parts(path: str, spec: CodeSpec, source: TensorSource) -> dict[str, TensorSource]:
    matrix = _Matrix(path, spec, source)
    return {f"{path}.{name}": Lazy(shape, _dtype(name), matrix.part(name)) for name, shape in spec.shapes().items()}


def _dtype(name: str) -> np.dtype:
    return np.dtype({CODES: np.uint8, COLUMNS: np.int32}.get(name, np.float32))


class _Matrix:
    """The tensors of one matrix, which is read once for all of them: they are kept until each has been taken."""

    def __init__(self, path: str, spec: CodeSpec, source: TensorSource) -> None:
        self.path, self.spec, self.source = path, spec, source
        self._left: dict[str, np.ndarray] = {}

    def part(self, name: str):
        """What gives one of the tensors."""

        def take() -> np.ndarray:
            if name not in self._left:
                self._left = self._read()
            return self._left.pop(name)

        return take

    def _read(self) -> dict[str, np.ndarray]:
        stored = self.source.source if isinstance(self.source, Converted) else self.source
        if not isinstance(stored, QuantizedMatrix):
            return rounded(np.asarray(stored, np.float32), self.spec)
        found = held_tensors(stored.codes())
        wanted, shapes = self.spec.shapes(), {name: array.shape for name, array in found.items()}
        if stored.section.code != self.spec.code or shapes != wanted:
            raise UserError(
                f"{stored.module.directory}: {stored.module.name} is in codes {stored.section.code} of shapes {shapes}, not "
                f"in those of model.model_config.quantization_config, {self.spec.code} {wanted}; leave the key out"
            )
        return found
