"""The architecture that a checkpoint says it holds."""

from __future__ import annotations

from pydantic import ValidationError

from mindllm.config import ModelConfig
from mindllm.errors import UserError
from mindllm.families import with_file_names
from mindllm.train.checkpoint.loading import Checkpoint


def model_of(checkpoint: Checkpoint) -> ModelConfig:
    """The architecture that a checkpoint says it holds; raises UserError when it says none."""
    try:
        return with_file_names(ModelConfig.model_validate(checkpoint.state["identity"]["model"]["config"]))
    except (KeyError, TypeError, ValidationError):
        raise UserError(
            f"{checkpoint.path}: state.json does not say the architecture (identity.model.config)"
        ) from None
