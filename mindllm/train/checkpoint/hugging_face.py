"""Weights of a Hugging Face directory, under our names, each tensor read when it is needed."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mindllm.config import ModelConfig
from mindllm.errors import UserError
from mindllm.models.families.llama import HUGGING_FACE
from mindllm.models.weight_shapes import weight_shapes
from mindllm.train.checkpoint.converted import Converted
from mindllm.train.checkpoint.formats import tensors_of_directory
from mindllm.train.checkpoint.loading import differences, floating_dtype
from mindllm.train.checkpoint.tensors import TensorSource

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def read_weights(directory: Path | str, model: ModelConfig) -> dict[str, Converted]:
    """The weights of ``model`` in fp32 by our names, none of them read yet.

    Raises:
        UserError: a file is damaged; or tensors are missing, surplus or misshapen, each named as the files name it.
    """
    directory = Path(directory)
    found = tensors_of_directory(directory)
    if model.tie_word_embeddings:
        _drop_equal_head(found)
    expected = {HUGGING_FACE.theirs(name): (name, shape) for name, shape in weight_shapes(model).items()}
    lines = differences(
        "weights", found, {name: (shape, floating_dtype(found, name)) for name, (_, shape) in expected.items()}
    )
    if lines:
        raise UserError(
            f"{directory} does not hold the weights of the model:\n  "
            + "\n  ".join(lines)
            + "\nget the files again, or give the architecture they were made for"
        )
    return {ours: Converted(theirs, found[theirs], np.dtype(np.float32)) for theirs, (ours, _) in expected.items()}


def _drop_equal_head(found: dict[str, TensorSource]) -> None:
    """Some files of a model with a tied head hold it again; one that says something else is surplus."""
    if HEAD in found and EMBEDDING in found and np.array_equal(found[HEAD], found[EMBEDDING]):
        del found[HEAD]
