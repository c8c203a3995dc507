"""Names and shapes of the weights of an architecture, known without building it."""

from __future__ import annotations

from mindllm.architecture.parts import Shapes
from mindllm.config import ModelConfig


def weight_shapes(model: ModelConfig) -> Shapes:
    """Shape of every weight by its name, in the order of the layers: what ``trained_weights`` of the built model has."""
    return model.architecture.weight_shapes()
