"""Matrices of a model as files of GPTQ or AWQ hold them: what is written in the place of weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np

from mindllm.architecture.adapters import WEIGHT
from mindllm.architecture.quantization import bits_of
from mindllm.config import ModelConfig
from mindllm.errors import UserError
from mindllm.quantize.codes import Codes
from mindllm.train.checkpoint.tensors import TensorSource
from mindllm.weight_files.family_weights import FamilyWeights
from mindllm.weight_files.hugging_face_export import InCodes
from mindllm.weight_files.quantized import awq, gptq

FileFormat = Literal["gptq", "awq"]
Matrices = dict[str, tuple[str, ...]]
"""By the name a projection has in the files, without ``.weight``, which weights of ours are its rows."""


def matrices_of(model: ModelConfig) -> Matrices:
    """The projections of layers that are written in codes, in the order of the layers.

    Raises:
        UserError: the model has layers with experts, which are not written so.
    """
    if model.expert_num > 1 or model.kv_lora_rank is not None:
        raise UserError("experts and latent attention are not written in codes; give a dense model")
    family = FamilyWeights(model)
    return {
        name.removesuffix(WEIGHT): weight.ours
        for name, weight in family.weights.items()
        if name.endswith(WEIGHT)
        and len(family.ours[weight.ours[0]]) == 2
        and all(ours.startswith("model.layers.") for ours in weight.ours)
    }


def matrix_of(model: ModelConfig, name: str, weights: Mapping[str, TensorSource]) -> np.ndarray:
    """The matrix ``[out, in]`` of a projection of :func:`matrices_of`, float32."""
    family = FamilyWeights(model)
    weight = family.weights[f"{name}{WEIGHT}"]
    values = np.asarray(family.write_one(weight, weights), np.float32)
    return values.T if weight.transposed else values


def require_packable(name: str, codes: Codes, form: FileFormat) -> None:
    """Raises a UserError for a matrix that does not fill the words of the format."""
    out, width = codes.shape
    per_word = 32 // bits_of(codes.code)
    if out % per_word or (form == "gptq" and width % per_word):
        raise UserError(
            f"{name}: {out} x {width} values do not fill words of {per_word} codes, which {form} files have"
        )


def stored(codes: Mapping[str, Codes], form: FileFormat, group: int) -> InCodes:
    """The tensors and the section of ``config.json`` for matrices in codes, by the names of :func:`matrices_of`."""
    tensors_of: Callable[[Codes], dict[str, np.ndarray]] = gptq.tensors if form == "gptq" else awq.tensors
    for name, matrix in codes.items():
        require_packable(name, matrix, form)
    first = next(iter(codes.values()))
    ordered = first.columns is not None
    tensors = {
        f"{name}{WEIGHT}": {f"{name}.{part}": array for part, array in tensors_of(matrix).items()}
        for name, matrix in codes.items()
    }
    return InCodes(_config(form, bits_of(first.code), group, ordered), tensors)


def _config(form: FileFormat, bits: int, group: int, ordered: bool) -> dict[str, Any]:
    common = {"quant_method": form, "bits": bits, "group_size": group or -1}
    if form == "awq":
        return {**common, "zero_point": True, "version": "gemm", "modules_to_not_convert": None}
    return {
        **common,
        "desc_act": ordered,
        "sym": True,
        "checkpoint_format": "gptq",
        "lm_head": False,
        "damp_percent": 0.01,
    }
