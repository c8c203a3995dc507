"""The Hugging Face directory that a YAML names: what it says counts for the keys beside it, and what stands in for one not there.

YAMLs of mcore networks name a directory, such as ``/path/to/Qwen3-32B``, and leave the architecture to its ``config.json``. Where
the last part is a public model that comes with mindllm, the architecture of that YAML is taken until the directory is there.
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
AHEAD = {"DeepSeek-V3": 1, "DeepSeek-V3-Base": 1}
"""Layers that predict further tokens, which the files of a model have; its YAML here has none."""
AHEAD_KEY = "num_nextn_predict_layers"
THEIRS = {  # what the keys of a YAML are read together with: their name to ours
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_experts": "expert_num",
    "moe_intermediate_size": "moe_intermediate_size",
    "kv_lora_rank": "kv_lora_rank",
}


def read_directory(reading: Reading) -> None:
    """Notes what the directory, or what stands in for it, says of the model; a directory that cannot be read is told of later."""
    named = reading.get(KEY)
    if not isinstance(named, str) or not named:
        return
    try:
        present = is_hugging_face(named)
        model = read_model_config(named).model_dump(exclude_unset=True) if present else standing_in(named)
    except UserError:
        return
    reading.assumed = {f"{MODEL}.{theirs}": model[ours] for theirs, ours in THEIRS.items() if model.get(ours)}


def shipped_yaml(directory: str) -> str:
    """The YAML below ``configs/`` whose architecture stands in for a directory that is not there; empty where there is none."""
    name = PUBLISHED.get(PurePath(directory).name, "")
    return f"{NAME}/{name}.yaml" if name and not Path(directory).exists() else ""


def standing_in(directory: str) -> dict[str, Any]:
    """The keys of ``model.model_config`` that describe the architecture; none where nothing stands in."""
    shipped = shipped_yaml(directory)
    if not shipped:
        return {}
    path = shipped_configs() / PurePath(shipped).relative_to(NAME)
    model = read_yaml(path.read_text(encoding="utf-8"), str(path)).data["model"]["model_config"]
    return {key: value for key, value in model.items() if key == "model_type" or key not in RUN_KEYS}


def fill_in(reading: Reading) -> None:
    """Writes what stands in for a directory that is not there, but for the keys that the YAML says itself."""
    named = reading.get(KEY)
    shipped = shipped_yaml(named) if isinstance(named, str) else ""
    if not shipped:
        return
    said = reading.ours.data.get("model", {}).get("model_config", {})
    for key, value in standing_in(named).items():
        if key not in said:
            reading.put(f"{MODEL}.{key}", value, (KEY,))
    _predict_ahead(reading, PurePath(named).name)
    told = f"the architecture of {shipped} stands in until the directory is there"
    if reading.entries[(KEY,)].outcome is not Outcome.REFUSED:
        reading.note(KEY, Outcome.USED, reason=told)
    reading.warnings.append(f"{KEY}: {named} is not there: {told}")


def predicts_ahead(reading: Reading) -> bool:
    """Whether the directory has layers that predict further tokens, or what stands in for it."""
    named = reading.get(KEY)
    if not isinstance(named, str) or not named:
        return False
    try:
        return (is_hugging_face(named) and read_model_config(named).num_nextn_predict_layers > 0) or (
            AHEAD.get(PurePath(named).name, 0) if shipped_yaml(named) else 0
        ) > 0
    except UserError:  # it is told of later
        return False


def expected_tokenizer(reading: Reading) -> str:
    """The tokenizer of a directory that is not there yet; empty where nothing stands in for one."""
    named = reading.get(KEY)
    return str(PurePath(named) / TOKENIZER) if isinstance(named, str) and shipped_yaml(named) else ""


def _predict_ahead(reading: Reading, name: str) -> None:
    """MindFormers builds the layers that ``config.json`` has, unless the YAML says how many."""
    layers = AHEAD.get(name, 0)
    if not layers or reading.has(f"{MODEL}.{AHEAD_KEY}"):
        return
    if AHEAD_KEY in ModelConfig.model_fields:
        reading.put(f"{MODEL}.{AHEAD_KEY}", layers, (KEY,))
    else:
        left_out = f"--{MODEL}.{AHEAD_KEY}=0 leaves it out"
        reading.refuse(
            KEY, f"{name} has {layers} layer that predicts further tokens, which is not here yet; {left_out}"
        )
