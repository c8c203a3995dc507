"""All weights of a run, from those that its ranks train and those that stay as they were read."""

from __future__ import annotations

from collections.abc import Mapping

from mindllm.train.checkpoint.tensors import TensorSource
from mindllm.train.state import RunState
from mindllm.weight_files.merging import merged


def whole_weights(state: RunState, trained: Mapping[str, TensorSource], key: str) -> Mapping[str, TensorSource]:
    """``trained`` weights with the frozen ones, adapters merged into these: those of ``model.merged``.

    Raises:
        UserError: about ``key``: the frozen ones were drawn from the seed, and no file has them.
    """
    if state.base is None:
        return trained
    if state.base_weights is None:
        message = "needs all weights, and those that are not trained were drawn from the seed; give load_checkpoint"
        raise state.config.error(key, message)
    return merged(state.config.model.config, state.base_weights, trained)
