"""The weights a run starts from: those of a checkpoint of ours, of a Hugging Face directory, or of MindFormers."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from mindllm.config import RunConfig, is_hugging_face
from mindllm.models.weight_shapes import weight_shapes
from mindllm.train.checkpoint.formats import code_of
from mindllm.train.checkpoint.hugging_face import read_weights
from mindllm.train.checkpoint.loading import load_checkpoint
from mindllm.train.checkpoint.mindformers import is_mindformers, read_mindformers

logger = logging.getLogger(__name__)


def pretrained_weights(config: RunConfig) -> Mapping[str, ArrayLike]:
    """The weights of ``load_checkpoint`` by our names, checked against the architecture: known before there is a model.

    Raises:
        UserError: there are none, they are damaged, or do not fit.
    """
    model = config.model.config
    if is_hugging_face(config.load_checkpoint):
        if code := code_of(Path(config.load_checkpoint)):
            logger.info("%s holds Python code, which is not run: %s", config.load_checkpoint, ", ".join(code))
        return read_weights(config.load_checkpoint, model)
    if is_mindformers(config.load_checkpoint):
        return read_mindformers(config.load_checkpoint, model)
    checkpoint = load_checkpoint(config.load_checkpoint, option="--load_checkpoint", with_optimizer=False)
    checkpoint.refuse_simulated()
    checkpoint.require({name: (shape, np.float32) for name, shape in weight_shapes(model).items()})
    return checkpoint.weights
