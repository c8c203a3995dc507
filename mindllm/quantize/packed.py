"""The tensors as which a model holds a projection in codes, and the codes that such tensors are."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mindllm.architecture.quantization import CODES, COLUMNS, SCALES, ZEROS, CodeName, CodeSpec
from mindllm.quantize.codes import Codes
from mindllm.quantize.nearest import quantize


def held_tensors(codes: Codes) -> dict[str, np.ndarray]:
    """What the tensors of ``DequantizedWeight`` hold of a matrix, by their names below the projection."""
    found = {CODES: codes.packed, SCALES: codes.scales[:, :, None, None]}
    if codes.zeros is not None:
        found[ZEROS] = codes.zeros[:, :, None, None]
    if codes.columns is not None:
        found[COLUMNS] = np.argsort(codes.columns).astype(np.int32)  # where each column of the matrix stands
    return found


def codes_of(code: CodeName, tensors: Mapping[str, np.ndarray]) -> Codes:
    """The matrix of which :func:`held_tensors` are ``tensors``; ``code``: its kind."""
    zeros, columns = (tensors.get(name) for name in (ZEROS, COLUMNS))
    return Codes(
        code,
        tensors[CODES],
        tensors[SCALES][:, :, 0, 0],
        None if zeros is None else zeros[:, :, 0, 0],
        None if columns is None else np.argsort(columns).astype(np.int32),
    )


def rounded(weight: np.ndarray, spec: CodeSpec) -> dict[str, np.ndarray]:
    """The same of a weight ``[out, in]`` that is rounded to codes now."""
    found = held_tensors(quantize(weight, spec.code, spec.group))
    return {**found, **({COLUMNS: np.arange(spec.in_features, dtype=np.int32)} if spec.ordered else {})}
