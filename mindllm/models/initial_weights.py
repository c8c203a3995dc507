"""The weights a run begins with, as arrays, without a device that holds them."""

from __future__ import annotations

import numpy as np
from mindspore import Parameter

from mindllm.config import RunConfig
from mindllm.models.causal_lm import build_model
from mindllm.models.weights import initial_value, trained_weights


def initial_weights(config: RunConfig) -> dict[str, np.ndarray]:
    """The weights of the whole model by name, fp32: those that one device begins with."""
    weights = trained_weights(build_model(config.model.config))
    return {name: _value(name, parameter, config.seed) for name, parameter in weights.items()}


def _value(name: str, parameter: Parameter, seed: int) -> np.ndarray:
    if hasattr(parameter, "initial_std"):
        return initial_value(name, tuple(parameter.shape), parameter.initial_std, seed)
    return parameter.init_data().asnumpy()
