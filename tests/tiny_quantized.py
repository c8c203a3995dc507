"""Tiny models in codes as directories of Hugging Face, each in a format and rounded by us or by its library."""

import json

import numpy as np
import quantized_files as files

from mindllm.architecture.adapters import WEIGHT
from mindllm.config import ModelConfig
from mindllm.quantize import quantize
from mindllm.weight_files import QuantizedExport, write_weights
from mindllm.weight_files.quantize import pack_matrices, quantizable_matrices, read_matrix

MODEL = ModelConfig(
    model_type="llama",
    vocab_size=97,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    n_kv_heads=2,
    intermediate_size=96,
    seq_length=16,
)
GROUP = 16


def random_weights(model=MODEL, seed=0, scale=0.2):
    random = np.random.default_rng(seed)
    shapes = model.architecture.weight_shapes()
    return {name: random.normal(len(shape) == 1, scale, shape).astype(np.float32) for name, shape in shapes.items()}


def in_files(kind, model, weights):
    """The matrices as a format has them."""
    matrices = {name: read_matrix(model, name, weights) for name in quantizable_matrices(model)}
    if kind in ("gptq", "act-order", "int8", "awq"):
        code = "uint8" if kind == "int8" else "uint4"
        form = "awq" if kind == "awq" else "gptq"
        codes = {name: quantize(matrix, code, GROUP, form == "gptq") for name, matrix in matrices.items()}
        if kind == "act-order":
            codes = {name: _reordered(matrix, number) for number, (name, matrix) in enumerate(matrices.items())}
        return pack_matrices(codes, form, GROUP)
    if kind == "nf4":
        config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
        parts = {name: files.four_bit(matrix, "nf4", True)[0] for name, matrix in matrices.items()}
    else:
        config = {"quant_method": "fp8", "weight_block_size": [GROUP, GROUP]}
        parts = {name: files.fp8(matrix, GROUP)[0] for name, matrix in matrices.items()}
    tensors = {
        f"{name}{WEIGHT}": {f"{name}.{part}": np.asarray(array) for part, array in found.items()}
        for name, found in parts.items()
    }
    return QuantizedExport(config, tensors)


def _reordered(matrix, seed):
    """Groups of columns drawn at random."""
    columns = np.random.default_rng(seed).permutation(matrix.shape[1]).astype(np.int32)
    straight = quantize(np.ascontiguousarray(matrix[:, columns]), "uint4", GROUP)
    return type(straight)(straight.code, straight.packed, straight.scales, straight.zeros, columns)


def save(directory, kind, model=MODEL, seed=0):
    """Writes a random model in codes; returns the weights it was rounded from."""
    weights = random_weights(model, seed)
    write_weights(directory, model, weights, quantized=in_files(kind, model, weights))
    json.loads((directory / "config.json").read_text())
    return weights
