"""Chatting, generating and evaluating with a model that a person names: neither a learning rate nor data is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mindllm.config.generation import GenerationConfig
from mindllm.families.hugging_face import GENERATION_CONFIG
from mindllm.recipes.device import ASCEND, CPU, device_choices, device_here
from mindllm.recipes.model_source import ModelSource
from mindllm.recipes.recipe import Choice, Recipe

BASE = "configs/base/use.yaml"
CONVERSATION = {CPU: 2048, ASCEND: 8192}  # tokens of one: the cache of keys and values is read for every token
ANSWER, CONTINUATION = 512, 256  # most new tokens where generation_config.json names none


def chat_recipe(model: ModelSource, command: str, output: Path) -> Recipe:
    """Return a conversation with a model."""
    return _used(model, command, output, "chat").with_choices(_answers(model, ANSWER))


def generate_recipe(model: ModelSource, command: str, output: Path, as_chat: bool | None = None) -> Recipe:
    """Return a run that answers prompts, or continues them where the model has no chat template.

    ``as_chat`` decides it; None: by the files of the model.
    """
    asks = has_chat_template(model) if as_chat is None else as_chat
    why = "asked for" if as_chat is not None else f"the model has {'a' if asks else 'no'} chat template"
    recipe = _used(model, command, output, "predict").with_choices(_answers(model, CONTINUATION))
    return recipe.with_choices([Choice("generation.apply_chat_template", asks, why)])


def evaluate_recipe(
    model: ModelSource, command: str, output: Path, tasks: list[str], options: dict[str, Any]
) -> Recipe:
    """Return an evaluation on tasks; ``options`` are those of section ``evaluation``."""
    chosen = [
        Choice("eval_tasks", tasks, "asked for"),
        Choice("context.enable_graph_kernel", False, "graphs of many shapes are compiled sooner without fusion"),
    ]
    chosen += [Choice(f"evaluation.{key}", value, "asked for") for key, value in options.items()]
    return _used(model, command, output, "eval").with_choices(chosen)


def has_chat_template(model: ModelSource) -> bool:
    """Whether the tokenizer of a model says how a conversation is written."""
    from mindllm.data import load_tokenizer
    from mindllm.data.chat.template import PLAIN, chat_template_of

    return bool(model.tokenizer) and chat_template_of(load_tokenizer(Path(model.tokenizer))).source != PLAIN


def _used(model: ModelSource, command: str, output: Path, mode: str) -> Recipe:
    chosen = [
        Choice("run_mode", mode, "the verb"),
        Choice("output_dir", str(output.resolve()), "where this file is"),
        Choice("load_checkpoint", str(model.weights.resolve()), "the model"),
    ]
    if model.adapter:
        chosen.append(Choice("load_adapter", str(Path(model.adapter).resolve()), "the adapter beside it"))
    device = device_choices(model, device_here())
    return Recipe(command, BASE, (*chosen, *model.choices(), *device, *_length(model, mode)))


def _length(model: ModelSource, mode: str) -> Iterator[Choice]:
    most = model.architecture.max_position_embedding
    if mode == "chat":
        most = min(most, CONVERSATION[device_here()])
        longest = model.architecture.max_position_embedding
        why = f"longest conversation: a longer cache is slower, up to the model's {longest}"
    else:
        why = "the longest context of the model"
    yield Choice("model.model_config.seq_length", most, why)


def _answers(model: ModelSource, most_new: int) -> Iterator[Choice]:
    """Yield the settings of ``generation_config.json``, and the longest answer."""
    settings = model.generation()
    fields = GenerationConfig.model_fields
    for key, value in settings.items():
        if value != fields[key].default:
            yield Choice(f"generation.{key}", value, f"of {GENERATION_CONFIG}")
    if settings.get("max_new_tokens") is None:
        longest = max(1, model.architecture.max_position_embedding // 2)
        yield Choice("generation.max_new_tokens", min(most_new, longest), "longest answer; --max_new_tokens N")
