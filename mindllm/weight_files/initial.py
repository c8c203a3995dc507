"""Updates that PEFT subtracts from the base when it creates an adapter, so that base and adapter begin as the whole weight.

PiSSA (Meng et al., 2024): the largest singular values; OLoRA (Buyukakyuz, 2024): the first columns of a QR decomposition.
"""

from __future__ import annotations

import numpy as np
from scipy.sparse.linalg import svds

from mindllm.errors import UserError

SMALL = 256  # matrices of which all singular values are computed
SMALLEST_GAP = 1e-5  # relative distance of the singular values at the cut: closer ones do not determine their vectors
UNDETERMINED = (
    "so its update is not determined; convert the adapter in the program that trained it "
    "(path_initial_model_for_weight_conversion)"
)


def subtract_initial(
    method: str, weight: np.ndarray, rank: int, scale: float, name: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return two matrices of ``rank``, ``[rank, in]`` and ``[out, rank]``, whose product times ``scale`` is subtracted.

    The second one has the sign in it: ``weight + scale * second @ first`` is the base that PEFT trains with.

    Raises:
        UserError: the weights do not determine the update; names ``name``.
    """
    matrix = weight.astype(np.float64)
    if method == "olora":
        orthogonal, triangle = np.linalg.qr(matrix[:, :rank])
        lengths = np.abs(np.diag(triangle))
        if lengths.min() < SMALLEST_GAP * lengths.max():
            raise UserError(f"{name}: init_lora_weights: columns of the base are linearly dependent, {UNDETERMINED}")
        return (orthogonal.T @ matrix).astype(np.float32), -orthogonal.astype(np.float32)
    left, values, right = _largest_singular(matrix, rank)
    if len(values) > rank and values[rank - 1] - values[rank] < SMALLEST_GAP * values[0]:
        raise UserError(
            f"{name}: init_lora_weights: singular values {rank} and {rank + 1} of the base are equal, {UNDETERMINED}"
        )
    roots = np.sqrt(values[:rank] / scale)
    first, second = roots[:, None] * right[:rank], left[:, :rank] * roots
    return first.astype(np.float32), -second.astype(np.float32)


def _largest_singular(matrix: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return more than ``rank`` singular vectors and values where there are more, the largest first."""
    smaller = min(matrix.shape)
    if smaller <= SMALL or rank + 1 > smaller // 8:
        return np.linalg.svd(matrix, full_matrices=False)
    left, values, right = svds(matrix, k=rank + 1, v0=np.ones(smaller), return_singular_vectors=True)
    return left[:, ::-1], values[::-1], right[::-1]
