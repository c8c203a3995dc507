"""The families of models: one file for each lineage, and nothing about a family anywhere else."""

from __future__ import annotations

from functools import lru_cache

from mindllm.config.model import ModelConfig
from mindllm.errors import UserError, nearest
from mindllm.families import (
    baichuan,
    bloom,
    deepseek,
    gemma,
    glm,
    gpt2,
    internlm,
    llama,
    mistral,
    qwen,
    telechat,
)
from mindllm.families.family import Family

FAMILIES: tuple[Family, ...] = (
    llama.FAMILY,
    qwen.QWEN2,
    qwen.QWEN3,
    mistral.MISTRAL,
    mistral.MIXTRAL,
    qwen.QWEN2_MOE,
    qwen.QWEN3_MOE,
    *deepseek.FAMILIES,
    *gemma.FAMILIES,
    *glm.FAMILIES,
    *internlm.FAMILIES,
    baichuan.FAMILY,
    qwen.QWEN,
    bloom.FAMILY,
    gpt2.FAMILY,
    llama.AQUILA,
    *telechat.FAMILIES,
)
"""In the order of search for a model without ``model_type``."""
BY_TYPE: dict[str, Family] = {name: family for family in FAMILIES for name in (family.name, *family.aliases)}


def family_named(model_type: str) -> Family:
    """Return the family with this ``model_type``; raise UserError if there is none."""
    if model_type not in BY_TYPE:
        raise UserError(f"unknown (value {model_type}){nearest(model_type, BY_TYPE)}")
    return BY_TYPE[model_type]


def family_of(model: ModelConfig) -> Family:
    """Return the family of a model: the one it names, else the first with such a model. Adapters are ignored.

    Raises:
        UserError: no family has such a model; names the keys that differ.
    """
    return _family_of(model.base)


def with_file_names(model: ModelConfig) -> ModelConfig:
    """Return ``model`` with the names of its projections in the family's files, by which adapters may select them."""
    try:
        return model.name_projections(family_of(model).weights.projections)
    except UserError:
        return model.name_projections({})


@lru_cache(maxsize=64)
def _family_of(model: ModelConfig) -> Family:
    named = [family_named(model.model_type)] if model.model_type else FAMILIES
    differing = {family.name: family.differs(model) for family in named}
    for family in named:
        if not differing[family.name]:
            return family
    name, keys = min(differing.items(), key=lambda found: len(found[1]))
    values = ", ".join(f"{key} {getattr(model, key)}" for key in keys)
    subject = (
        f"no {name} model has" if model.model_type else f"no family has this combination; the nearest, {name}, has not"
    )
    raise UserError(f"{subject} {values}")
