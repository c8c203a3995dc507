"""Weights of a Hugging Face directory, under our names, each tensor read when it is needed."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import numpy as np

from mindllm.config import ModelConfig
from mindllm.errors import UserError
from mindllm.families.hugging_face import quantization_in
from mindllm.train.checkpoint.loading import differences, floating_dtype
from mindllm.train.checkpoint.tensors import Converted, TensorSource
from mindllm.weight_files.family_weights import FamilyWeights, by_expert
from mindllm.weight_files.files import tensors_of_directory
from mindllm.weight_files.quantized.directory import with_matrices

logger = logging.getLogger(__name__)
HEAD, EMBEDDING = "lm_head.weight", "model.tok_embeddings.embedding_weight"  # our names


def read_weights(directory: Path | str, model: ModelConfig) -> dict[str, Converted]:
    """The weights of ``model`` in fp32 by our names, none of them read yet; matrices in codes are dequantized then.

    Raises:
        UserError: a file is damaged; or tensors are missing, surplus or misshapen, each named as the files name it.
    """
    directory = Path(directory)
    family = FamilyWeights(model)
    tensors = _matrices(directory, tensors_of_directory(directory), family)
    tensors = _of_model(tensors, directory, model, family)
    found = by_expert(_known(tensors, family), family.table)
    if model.tie_word_embeddings:
        _drop_equal_head(found, family)
    expected = family.shapes()
    lines = differences(
        "weights", found, {name: (shape, floating_dtype(found, name)) for name, shape in expected.items()}
    )
    if lines:
        raise UserError(
            f"{directory} does not hold the weights of the model:\n  "
            + "\n  ".join(lines)
            + "\nget the files again, or give the architecture they were made for"
        )
    read = family.read(found)
    return {ours: Converted(theirs, source, np.dtype(np.float32)) for ours, (theirs, source) in read.items()}


def _matrices(directory: Path, tensors: dict[str, TensorSource], family: FamilyWeights) -> dict[str, TensorSource]:
    """The tensors with matrices in the place of codes."""
    section = quantization_in(directory)
    if section is None:
        return tensors
    transposed = {name for name, weight in family.weights.items() if weight.transposed}
    return with_matrices(directory, tensors, section, transposed)


def _of_model(
    found: dict[str, TensorSource], directory: Path, model: ModelConfig, family: FamilyWeights
) -> dict[str, TensorSource]:
    """Without layers behind those of the model, and without what layers that predict ahead share with the others here.

    Raises:
        UserError: a layer that predicts ahead is not there.
    """
    if not family.table.further_layers:
        return found
    matches = {name: re.match(r"model\.layers\.(\d+)\.", name) for name in found}
    layers = {name: int(layer[1]) for name, layer in matches.items() if layer}
    there = {*layers.values()}
    if absent := [layer for layer in range(model.num_layers, model.placed_layers) if layer not in there]:
        raise UserError(
            f"{directory} does not hold layer {absent[0]}, which predicts ahead; write model.model_config."
            f"num_nextn_predict_layers: {absent[0] - model.num_layers}"
        )
    if further := sorted(layer for layer in there if layer >= model.placed_layers):
        logger.info("%s: layers from %d on, which predict ahead, are not read", directory, further[0])
    kept = (name for name in found if layers.get(name, 0) < model.placed_layers and name not in family.copies)
    return {name: found[name] for name in kept}


def _known(found: dict[str, TensorSource], family: FamilyWeights) -> dict[str, TensorSource]:
    """Without tables that models compute, and under names with the prefix that files may leave out."""
    prefix, computed = family.table.prefix, family.table.computed
    kept = {name: tensor for name, tensor in found.items() if not (computed and name.endswith(computed))}
    outside = {weight.theirs for weight in family.table.weights if not weight.theirs.startswith(prefix)}
    return {name if name.startswith(prefix) or name in outside else prefix + name: kept[name] for name in kept}


def _drop_equal_head(found: dict[str, TensorSource], family: FamilyWeights) -> None:
    """Some files of a model with a tied head hold it again; one that says something else is surplus."""
    head, embedding = family.table.theirs(HEAD), family.table.theirs(EMBEDDING)
    if head in found and embedding in found and np.array_equal(found[head], found[embedding]):
        del found[head]
