"""The trained weights as a Hugging Face directory, when the last step of the whole run is done."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from mindllm.data import Tokenizer
from mindllm.files import size_in_bytes
from mindllm.train.checkpoint import CheckpointStore, load_checkpoint
from mindllm.train.checkpoint.hugging_face_export import export_hugging_face
from mindllm.train.checkpoint.parts import joined
from mindllm.train.state import RunState
from mindllm.train.whole_weights import whole_weights

logger = logging.getLogger(__name__)


def export(state: RunState, store: CheckpointStore, tokenizer: Tokenizer | None) -> None:
    """Writes the weights as section ``export_hf`` says; of a process that does not have all of them, from the last checkpoint.

    Raises:
        UserError: ranks have parts of the weights, and the last step was not saved.
    """
    section = state.config.export_hf
    if not section.directory or state.step < state.total_steps:
        return
    directory = export_hugging_face(
        section.directory,
        state.config.model.config.merged,
        _whole_weights(state, store),
        dtype=section.dtype,
        max_shard_bytes=size_in_bytes(section.max_shard_size),
        tokenizer=tokenizer,
    )
    logger.info("exported the weights to %s in %s", directory, section.dtype)
    state.results["Hugging Face directory"] = str(directory)


def _whole_weights(state: RunState, store: CheckpointStore) -> Mapping[str, Any]:
    held = state.engine.local_state()
    if state.engine.holds_all:
        return whole_weights(state, joined(tensors.weights for tensors in held.values()), "export_hf.directory")
    newest = store.newest()
    checkpoint = load_checkpoint(newest, with_optimizer=False) if newest is not None else None
    if checkpoint is None or checkpoint.step != state.step:
        message = "ranks have parts of the weights, and the last step was not saved; add the callback CheckpointMonitor"
        raise state.config.error("export_hf.directory", message)
    return whole_weights(state, checkpoint.weights, "export_hf.directory")
