"""The weights a run starts from: those of a checkpoint of ours or of a Hugging Face directory."""

from __future__ import annotations

from collections.abc import Mapping

from mindspore import Parameter

from mindllm.config import RunConfig, is_hugging_face
from mindllm.models.weights import assign, signatures
from mindllm.train.checkpoint.hugging_face import read_weights
from mindllm.train.checkpoint.loading import load_checkpoint


def load_weights(parameters: Mapping[str, Parameter], config: RunConfig) -> None:
    """Puts the weights of ``load_checkpoint`` into ``parameters``.

    Raises:
        UserError: there are none, they are damaged, or do not fit; nothing has been changed then.
    """
    if is_hugging_face(config.load_checkpoint):
        assign(parameters, read_weights(config.load_checkpoint, config.model.config))
        return
    checkpoint = load_checkpoint(config.load_checkpoint, option="--load_checkpoint", with_optimizer=False)
    checkpoint.require(signatures(parameters))
    assign(parameters, checkpoint.weights)
