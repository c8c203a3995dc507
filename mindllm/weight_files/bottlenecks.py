"""Bottlenecks in files. PEFT has no such adapters; the form is PEFT's, two files with content of our own.

``adapter_config.json``: ``peft_type: BOTTLENECK``, the keys of the section ``pet_config``, and the base.
``adapter_model.safetensors``: fp32 tensors by our names (``model.layers.0.feed_forward_adapter.down.weight``), the fingerprint
of the base in the header.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from mindllm.architecture.tuners import BOTTLENECK, TUNERS
from mindllm.config import ModelConfig
from mindllm.config.tuning import PetConfig
from mindllm.errors import UserError
from mindllm.families.hugging_face import read_json
from mindllm.train.checkpoint.loading import Base
from mindllm.train.checkpoint.names import refuse_existing
from mindllm.train.checkpoint.tensors import TensorSource, read_metadata
from mindllm.weight_files.adapter import Adapter
from mindllm.weight_files.files import tensors_of_file
from mindllm.weight_files.peft import CONFIG_FILE, FINGERPRINT, WEIGHTS_FILE, is_peft, write_adapter_files

KIND = "BOTTLENECK"
KEYS = TUNERS[BOTTLENECK].keys


def is_bottlenecks(path: Path) -> bool:
    """Whether a directory holds what :func:`write_bottlenecks` writes."""
    return is_peft(path) and read_json(path / CONFIG_FILE).get("peft_type") == KIND


def read_bottlenecks(directory: Path) -> Adapter:
    """The bottlenecks in ``directory``; nothing of the weights is read but their header.

    Raises:
        UserError: files are missing, damaged, or say something that is not understood.
    """
    content, path = read_json(directory / CONFIG_FILE), directory / WEIGHTS_FILE
    if not path.is_file():
        raise UserError(f"{directory}: has no {WEIGHTS_FILE}")
    try:
        pet = PetConfig.model_validate(
            {"pet_type": BOTTLENECK, **{key: content[key] for key in KEYS if key in content}}
        )
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise UserError(f"{directory / CONFIG_FILE}: {key}: is not understood ({first['msg']})") from None
    base = Base(str(content.get("base_model_name_or_path") or ""), read_metadata(path).get(FINGERPRINT, ""))
    return Adapter(directory, pet, tensors_of_file(path), base)


def write_bottlenecks(
    directory: Path, model: ModelConfig, weights: Mapping[str, TensorSource], base: Base | None
) -> Path:
    """Writes the trained bottlenecks of ``model`` as ``directory``, whole or not at all; errors as those of ``write_peft``."""
    refuse_existing(directory)
    assert model.pet_config is not None
    said = model.pet_config.model_dump(mode="json", include=set(KEYS))
    content: dict[str, Any] = {
        "peft_type": KIND,
        "base_model_name_or_path": base.path if base and base.path else None,
        **said,
    }
    tensors = {name: weights[name] for name in model.architecture.trained_shapes()}
    return write_adapter_files(directory, content, tensors, base)
