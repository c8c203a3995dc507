"""The Hugging Face directory that a YAML names: its ``config.json`` applies; a shipped YAML replaces a missing directory.

YAMLs of mcore networks name a directory instead of sizes. If it does not exist, and its name is that of a public model with a
YAML in ``configs/``, the architecture of that YAML is used, so that a dry run needs no download.
"""

from __future__ import annotations

from pathlib import Path, PurePath
from typing import Any

from mindllm.config.model import ModelConfig
from mindllm.config.reading.shipped import NAME, shipped_configs
from mindllm.config.reading.yaml_tree import read_yaml
from mindllm.errors import UserError
from mindllm.families.family import RUN_KEYS
from mindllm.families.hugging_face import is_hugging_face, read_model_config
from mindllm.mindformers.reading import Outcome, Reading

KEY = "pretrained_model_dir"
MODEL = "model.model_config"
TOKENIZER = "tokenizer.json"
PUBLISHED = {  # the name of a directory: the YAML below configs/ with its architecture
    **{f"Qwen3-{size}": f"qwen3/pretrain_qwen3_{size.lower().replace('.', '_')}" for size in ("0.6B", "1.7B", "4B")},
    **{f"Qwen3-{size}": f"qwen3/pretrain_qwen3_{size.lower()}" for size in ("8B", "14B", "32B")},
    "Qwen3-30B-A3B": "qwen3_moe/pretrain_qwen3_moe_30b_a3b",
    "Qwen3-235B-A22B": "qwen3_moe/pretrain_qwen3_moe_235b_a22b",
    **{f"Qwen2.5-{size}": f"qwen2_5/pretrain_qwen2_5_{size.lower()}" for size in ("3B", "7B", "14B", "32B", "72B")},
    **{f"Qwen2.5-{size}": f"qwen2_5/pretrain_qwen2_5_{size.lower().replace('.', '_')}" for size in ("0.5B", "1.5B")},
    "DeepSeek-V3": "deepseek/pretrain_deepseek_v3_671b",
    "DeepSeek-V3-Base": "deepseek/pretrain_deepseek_v3_671b",
    "GLM-4-9B-0414": "glm/pretrain_glm4_9b_0414",
    "Mixtral-8x7B-v0.1": "mixtral/pretrain_mixtral_8x7b",
    "Mistral-7B-v0.1": "mistral/pretrain_mistral_7b",
}
MTP_LAYERS = {"DeepSeek-V3": 1, "DeepSeek-V3-Base": 1}
"""Multi-token prediction layers in the files of a model whose shipped YAML has none."""
MTP_KEY = "num_nextn_predict_layers"
HF_NAMES = {  # keys of Hugging Face that are read together with the YAML
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_experts": "expert_num",
    "moe_intermediate_size": "moe_intermediate_size",
    "kv_lora_rank": "kv_lora_rank",
}


def read_directory(reading: Reading) -> None:
    """Read the model from the directory or its replacement. Errors in the directory are reported later."""
    named = reading.get(KEY)
    if not isinstance(named, str) or not named:
        return
    try:
        present = is_hugging_face(named)
        model = read_model_config(named).model_dump(exclude_unset=True) if present else standing_in(named)
    except UserError:
        return
    reading.assumed = {f"{MODEL}.{name}": model[ours] for name, ours in HF_NAMES.items() if model.get(ours)}


def shipped_yaml(directory: str) -> str:
    """Return the YAML below ``configs/`` whose architecture replaces a missing directory; empty if there is none."""
    name = PUBLISHED.get(PurePath(directory).name, "")
    return f"{NAME}/{name}.yaml" if name and not Path(directory).exists() else ""


def standing_in(directory: str) -> dict[str, Any]:
    """Return the keys of ``model.model_config`` for the architecture; empty without a replacement."""
    shipped = shipped_yaml(directory)
    if not shipped:
        return {}
    path = shipped_configs() / PurePath(shipped).relative_to(NAME)
    model = read_yaml(path.read_text(encoding="utf-8"), str(path)).data["model"]["model_config"]
    return {key: value for key, value in model.items() if key == "model_type" or key not in RUN_KEYS}


def fill_in(reading: Reading) -> None:
    """Add the keys of the replacement for a missing directory that the YAML omits."""
    named = reading.get(KEY)
    shipped = shipped_yaml(named) if isinstance(named, str) else ""
    if not shipped:
        return
    model_keys = reading.ours.data.get("model", {}).get("model_config", {})
    for key, value in standing_in(named).items():
        if key not in model_keys:
            reading.put(f"{MODEL}.{key}", value, (KEY,))
    _translate_mtp(reading, PurePath(named).name)
    message = f"the architecture of {shipped} stands in until the directory is there"
    if reading.entries[(KEY,)].outcome is not Outcome.REFUSED:
        reading.note(KEY, Outcome.USED, reason=message)
    reading.warnings.append(f"{KEY}: {named} is not there: {message}")


def has_mtp_layers(reading: Reading) -> bool:
    """Return True if the directory, or its replacement, has multi-token prediction layers."""
    named = reading.get(KEY)
    if not isinstance(named, str) or not named:
        return False
    try:
        return (is_hugging_face(named) and read_model_config(named).num_nextn_predict_layers > 0) or (
            MTP_LAYERS.get(PurePath(named).name, 0) if shipped_yaml(named) else 0
        ) > 0
    except UserError:  # reported later
        return False


def expected_tokenizer(reading: Reading) -> str:
    """Return the tokenizer of a missing directory; empty without a replacement."""
    named = reading.get(KEY)
    return str(PurePath(named) / TOKENIZER) if isinstance(named, str) and shipped_yaml(named) else ""


def _translate_mtp(reading: Reading, name: str) -> None:
    """Translate multi-token prediction: MindFormers builds the layers of ``config.json`` unless the YAML has a number."""
    layers = MTP_LAYERS.get(name, 0)
    if not layers or reading.has(f"{MODEL}.{MTP_KEY}"):
        return
    if MTP_KEY in ModelConfig.model_fields:
        reading.put(f"{MODEL}.{MTP_KEY}", layers, (KEY,))
    else:
        option = f"--{MODEL}.{MTP_KEY}=0 leaves it out"
        reading.refuse(KEY, f"{name} has {layers} multi-token prediction layer, which is not supported yet; {option}")
