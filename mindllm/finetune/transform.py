"""Tuning of a built model: adapters are attached to projections, and weights that are not trained are frozen.

Also the initial weights of the tuned model, as arrays.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import mindspore as ms
import numpy as np
from mindspore import Parameter, nn

from mindllm.architecture.adapters import MAGNITUDE, VALUES, A, B
from mindllm.architecture.layer import LayerSpec
from mindllm.architecture.tuners import layer_origins
from mindllm.config import ModelConfig, RunConfig
from mindllm.finetune.adapters import Bottleneck, LoraAdapter
from mindllm.models import CausalLM, Kernels, build_model
from mindllm.models.causal_lm import Head
from mindllm.models.decoder import DecoderLayer, TokenEmbedding
from mindllm.models.dequantize import DequantizedWeight
from mindllm.models.experts.experts import ExpertLinear
from mindllm.models.experts.grouped_experts import BlockProduct, GroupedProduct
from mindllm.models.kernels import DTYPES
from mindllm.models.linear import Linear
from mindllm.models.weights import drawn_value, frozen_parameter, in_value_type, model_weights, quantized_parameters

MATRICES: dict[type[nn.Cell], str] = {
    Linear: "weight",
    ExpertLinear: "weight",
    GroupedProduct: "weight",
    BlockProduct: "weight",
    Head: "weight",
    TokenEmbedding: "embedding_weight",
}
"""Cells whose matrix can be held in another type than fp32, and its attribute."""


def tune(lm: CausalLM, model: ModelConfig, kernels: Kernels) -> None:
    """Transform ``lm``, which was built from ``model``, unless the section ``pet_config`` is absent.

    Call it before operators or trained weights of the model are used.
    """
    pet = model.pet_config
    if pet is None:
        return
    for number, (layer, spec) in enumerate(zip(lm.model.layers, model.architecture.layers, strict=True)):
        _hold(layer, spec, kernels, f"model.layers.{number}")
        _attach(layer, spec, kernels, f"model.layers.{number}")
    weights, trained = model_weights(lm), model.architecture.trained_shapes()
    for number, (origin, spec) in enumerate(
        zip(layer_origins(pet.tuning, model.num_layers), model.architecture.layers, strict=True)
    ):
        if origin.copied:
            _zero_init([weights[f"model.layers.{number}.{name}"] for name in spec.last_of_branches()])
    for name, parameter in weights.items():
        parameter.requires_grad = name in trained
    if model.frozen_dtype != "float32":
        _hold_frozen(lm, DTYPES[model.frozen_dtype], kernels)


def _hold_frozen(lm: CausalLM, dtype: ms.dtype, kernels: Kernels) -> None:
    """Convert frozen matrices to ``dtype``. Operands of products are cast anyway, and so are embedded rows.

    Tables that enter computations as a whole stay in fp32, and so does an embedding on a CPU, which cannot look up bf16.
    """
    for _, cell in lm.cells_and_names():
        name = MATRICES.get(type(cell), "")
        weight = getattr(cell, name, None) if name else None
        if weight is not None and not weight.requires_grad and not _needs_fp32(cell, lm, kernels):
            setattr(cell, name, frozen_parameter(weight, dtype))


def _needs_fp32(cell: nn.Cell, lm: CausalLM, kernels: Kernels) -> bool:
    if isinstance(cell, TokenEmbedding):
        return not kernels.fused or (lm.tied and lm.normalised)
    return isinstance(cell, Head) and lm.normalised


def build_tuned_model(model: ModelConfig, device_target: str = "CPU") -> CausalLM:
    """Build a model and tune it according to its configuration."""
    lm = build_model(model, device_target)
    tune(lm, model, Kernels.choose(model, device_target))
    return lm


def _hold(layer: nn.Cell, spec: LayerSpec, kernels: Kernels, path: str) -> None:
    """Store projections of one layer as codes, if its specification has them."""
    for code in spec.codes:
        projection, codes = _projection(layer, code.module), DequantizedWeight(code, kernels.cpu)
        drawn = _drawing(projection.weight)
        projection.hold(codes)
        codes.name_below(f"{path}.{code.module}", drawn)


def _attach(layer: DecoderLayer, spec: LayerSpec, kernels: Kernels, path: str) -> None:
    """Attach the adapters of one layer, then name their parameters: each cell renames those of a shared adapter."""
    adapters: dict[str, LoraAdapter] = {}
    for adapter in spec.adapters:
        shared = adapters[adapter.first_matrix_of] if adapter.first_matrix_of else None
        together = adapter.first_matrix_of or adapter.module  # one adapter in files, so that both have the same dropout
        adapters[adapter.module] = LoraAdapter(adapter, kernels, shared, zlib.crc32(together.encode()))
        _projection(layer, adapter.module).attach(adapters[adapter.module])
    insert = {"attention": layer.attach_after_attention, "feed_forward": layer.attach_after_feed_forward}
    for bottleneck in spec.bottlenecks:
        inserted = Bottleneck(bottleneck, kernels)
        insert[bottleneck.module](inserted)
        inserted.update_parameters_name(f"{path}.{bottleneck.name}.")
    for adapter in spec.adapters:
        cell, name = adapters[adapter.module], f"{path}.{adapter.module}"
        if not adapter.first_matrix_of:
            cell.lora_a.name = f"{name}.{A}"
            if adapter.has_values:
                cell.lora_e.name = f"{name}.{VALUES}"
        cell.lora_b.name = f"{name}.{B}"
        if adapter.dora:
            cell.lora_magnitude.name = f"{name}.{MAGNITUDE}"
            cell.lora_magnitude.lengths_of = _drawn(_projection(layer, adapter.module))


def _drawn(projection: Linear) -> tuple[str, tuple[int, ...], float]:
    return projection.held.drawn if projection.is_quantized else _drawing(projection.weight)


def _zero_init(outputs: Iterable[Parameter]) -> None:
    """Initialize weights with zeros. Biases start with zeros in any model."""
    for weight in outputs:
        if hasattr(weight, "initial_std"):
            weight.initial_std = 0.0


def _drawing(weight: Parameter) -> tuple[str, tuple[int, ...], float]:
    """Return the parameters of a weight's initial values."""
    return weight.name, tuple(weight.shape), weight.initial_std


def _projection(layer: nn.Cell, module: str) -> Linear:
    cell = layer
    for name in module.split("."):
        cell = getattr(cell, name)
    if not isinstance(cell, Linear):
        raise TypeError(f"{module} is of class {type(cell).__name__}, which supports neither adapters nor codes")
    return cell


def initial_weights(config: RunConfig) -> dict[str, np.ndarray]:
    """Return the initial weights of the whole model on one device by name, including adapters and frozen ones, in the types of
    their values.

    They are not on a device. Quantized projections have their codes, in the dtypes of these.
    """
    model = build_tuned_model(config.model.config)
    weights = {**model_weights(model), **quantized_parameters(model)}
    return {name: _value(name, parameter, config.seed) for name, parameter in weights.items()}


def _value(name: str, parameter: Parameter, seed: int) -> np.ndarray:
    drawn = drawn_value(name, tuple(parameter.shape), parameter, seed)
    return parameter.init_data().asnumpy() if drawn is None else in_value_type(drawn, parameter)
