"""The weights a run begins with, as arrays, without a device that holds them."""

from __future__ import annotations

import numpy as np
from mindspore import Parameter

from mindllm.config import RunConfig
from mindllm.finetune.transform import build_tuned_model
from mindllm.models.weights import drawn_value, model_weights, quantized_parameters


def initial_weights(config: RunConfig) -> dict[str, np.ndarray]:
    """The weights of the whole model by name, fp32, adapters and frozen ones too: those that one device begins with.

    Projections that are held in codes are their codes, in the dtypes of these.
    """
    model = build_tuned_model(config.model.config)
    weights = {**model_weights(model), **quantized_parameters(model)}
    return {name: _value(name, parameter, config.seed) for name, parameter in weights.items()}


def _value(name: str, parameter: Parameter, seed: int) -> np.ndarray:
    drawn = drawn_value(name, tuple(parameter.shape), parameter, seed)
    return parameter.init_data().asnumpy() if drawn is None else drawn
