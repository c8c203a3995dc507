"""Which operators the mathematics is written with: fused ones of the accelerator, or compositions every back end has.

The CPU back end has no RmsNorm, Swiglu, RotaryPositionEmbedding or FlashAttentionScore kernel and almost no bf16 kernel.
There the same formulas are composed from elementary operators, and bf16 rounds the operands of matrix products only.
"""

from __future__ import annotations

from dataclasses import dataclass

import mindspore as ms
import numpy as np

from mindllm.config import ModelConfig
from mindllm.models.attention.sequence_order import balanced_order
from mindllm.models.pieces import InPieces
from mindllm.models.weights import FLOAT32, WeightType

DTYPES = {"float32": ms.float32, "float16": ms.float16, "bfloat16": ms.bfloat16}


@dataclass(frozen=True)
class Kernels:
    """The operators and dtypes a model is built from.

    ``activation`` is the dtype of activations, ``operand`` the one to which operands of matrix products are rounded. They
    differ only for bf16 on CPU: activations stay fp32 and only operands are rounded. ``residual`` is the dtype of hidden states
    between layers if it differs from ``activation``. ``cpu`` chooses forms that are fast on one CPU and are never sharded.
    ``same_shapes``: products do not broadcast (:mod:`mindllm.models.cpu_broadcast`), on a CPU that does not fuse them.
    ``document_masks``: rows have several separate documents, so that every row has its own mask instead of the causal one for
    all. ``norm``, ``softmax`` and ``rotary`` are the dtypes inside the norms, the attention's softmax and the rotation.
    ``sequence_ranks`` devices share each sequence, with ``balanced`` in balanced halves: tokens are in the order of
    :mod:`mindllm.models.attention.sequence_order`; in a ``ring`` their keys and values rotate
    (:mod:`mindllm.models.attention.ring_attention`). ``tensor_ranks`` share the heads. ``row_parts``: parts in which layers
    compute their rows outside attention
    (:mod:`mindllm.models.fine_grain_interleave`); ``joins`` are the layers that send their rows to another stage.
    ``watches_logits``: each layer records the largest attention logit (:mod:`mindllm.models.attention.largest_logit`).
    ``pieces``: of sequences in a pipeline (:mod:`mindllm.models.pieces`), or None.
    ``weights`` and ``norm_weights`` are the types of matrices, tables and biases, and of the parameters of norms.
    """

    fused: bool
    flash_attention: bool
    activation: ms.dtype
    operand: ms.dtype
    cpu: bool = False
    same_shapes: bool = False
    document_masks: bool = False
    norm: ms.dtype = ms.float32
    softmax: ms.dtype = ms.float32
    rotary: ms.dtype = ms.float32
    residual: ms.dtype | None = None
    sequence_ranks: int = 1
    balanced: bool = False
    ring: bool = False
    tensor_ranks: int = 1
    row_parts: int = 1
    joins: frozenset[int] = frozenset()
    watches_logits: bool = False
    pieces: InPieces | None = None
    weights: WeightType = FLOAT32
    norm_weights: WeightType = FLOAT32

    @property
    def hidden(self) -> ms.dtype:
        """The dtype of hidden states between layers and of their sums."""
        return self.activation if self.residual is None else self.residual

    def positions(self, length: int) -> np.ndarray:
        """Return the position of each token of a sequence in its order, int32 ``[length]``."""
        return balanced_order(length, self.sequence_ranks) if self.balanced else np.arange(length, dtype=np.int32)

    @property
    def rounds_operands(self) -> bool:
        return self.activation != self.operand

    @staticmethod
    def choose(model: ModelConfig, device_target: str, fuses: bool = True) -> Kernels:
        """Picks operators for ``device_target``. A CPU has no kernel of fused attention, whatever ``use_flash_attention`` is.

        ``fuses``: elementwise operators are fused, so that what broadcasts costs nothing.
        """
        on_device = device_target != "CPU"
        supports_fusion = all(spec.attention.can_be_fused for spec in model.architecture.specifications())
        flash = on_device and model.use_flash_attention is not False and supports_fusion
        operand = DTYPES[model.compute_dtype]
        keeps_fp32 = not on_device and operand == ms.bfloat16
        return Kernels(
            fused=on_device,
            flash_attention=flash,
            activation=ms.float32 if keeps_fp32 else operand,
            operand=operand,
            cpu=not on_device,
            same_shapes=not on_device and not fuses,
            norm=DTYPES[model.layernorm_compute_type],
            softmax=DTYPES[model.softmax_compute_type],
            rotary=DTYPES[model.rotary_dtype],
            residual=ms.float32 if model.fp32_residual_connection else None,
            weights=_weight_type(model.param_init_type, on_device),
            norm_weights=_weight_type(model.parameter_type("norm.weight"), on_device),
        )


def _weight_type(name: str, on_device: bool) -> WeightType:
    """Return the type of weights. A CPU has few kernels for short types: it stores float32 that hold rounded values."""
    return WeightType(DTYPES[name], DTYPES[name] if on_device else ms.float32)
