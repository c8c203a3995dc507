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
"""In the order in which they are tried for a model that says no ``model_type``."""
BY_TYPE: dict[str, Family] = {name: family for family in FAMILIES for name in (family.name, *family.aliases)}


def family_named(model_type: str) -> Family:
    """The family whose files say this ``model_type``; raises UserError where there is none."""
    if model_type not in BY_TYPE:
        raise UserError(f"unknown (value {model_type}){nearest(model_type, BY_TYPE)}")
    return BY_TYPE[model_type]


def family_of(model: ModelConfig) -> Family:
    """The family of a model: the one it names, else the first that has such a model. Adapters change nothing about it.

    Raises:
        UserError: the one it names has no such model, or none has; says which keys are in the way.
    """
    return _family_of(model.base)


def with_file_names(model: ModelConfig) -> ModelConfig:
    """Return ``model``, knowing what the files of its family call its projections: adapters may be given by these names."""
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
    who = (
        f"no {name} model has" if model.model_type else f"no family has this combination; the nearest, {name}, has not"
    )
    raise UserError(f"{who} {values}")
