"""The files of a tokenizer in a Hugging Face directory, copied next to exported weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mindllm.data.chat.template import PLAIN, TOOL_USE, chat_template_of
from mindllm.data.tokenizers.tokenizer import JsonTokenizer, Tokenizer
from mindllm.files import atomic_open
from mindllm.outside import read_bytes

COMPANIONS = (  # next to tokenizer.json or tokenizer.model
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
)
SPACE = "▁"  # sentencepiece's


def copy_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Copy the file of ``tokenizer`` and its companions into ``directory``.

    A tokenizer without ``tokenizer_config.json`` gets one, for ``AutoTokenizer`` of ``transformers`` to know its kind.
    """
    source = tokenizer.path
    if isinstance(tokenizer, JsonTokenizer) and tokenizer.is_made:
        # transformers has no code for these files without that of their directories.
        with atomic_open(directory / "tokenizer.json") as target:
            target.write(tokenizer.content)
        _write_config(directory, {**_config(tokenizer), **_template(tokenizer)})
        return
    _copy(source, directory / f"tokenizer{source.suffix}")
    counterpart = source.with_name("tokenizer.model" if source.suffix == ".json" else "tokenizer.json")
    is_named_so = source.stem == "tokenizer"  # otherwise the directory may have files of other tokenizers
    for file in (counterpart, *map(source.parent.joinpath, COMPANIONS)) if is_named_so else ():
        if file.is_file():
            place = directory / file.relative_to(source.parent)
            place.parent.mkdir(exist_ok=True)
            _copy(file, place)
    if not (directory / "tokenizer_config.json").exists():
        _write_config(directory, _config(tokenizer))


def _copy(source: Path, target: Path) -> None:
    with atomic_open(target, "wb") as file:
        file.write(read_bytes(source))


def _write_config(directory: Path, content: Mapping[str, Any]) -> None:
    with atomic_open(directory / "tokenizer_config.json") as target:
        json.dump(content, target, indent=2, ensure_ascii=False)


def _template(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the chat template of the tokenizer, or both templates by name; empty for a plain one."""
    template = chat_template_of(tokenizer)
    if template.for_tools is None:
        return {} if template.source == PLAIN else {"chat_template": template.source}
    sources = {"default": template.source, TOOL_USE: template.for_tools.source}
    return {"chat_template": [{"name": name, "template": source} for name, source in sources.items()]}


def _config(tokenizer: Tokenizer) -> dict[str, str | bool]:
    ids = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id, "pad_token": tokenizer.pad_id}
    names = {role: tokenizer.token(id) for role, id in ids.items() if id is not None}
    if isinstance(tokenizer, JsonTokenizer):
        return {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    prefixed = tokenizer.token(tokenizer.encode("a")[0]).startswith(SPACE)
    flags = {"add_bos_token": tokenizer.adds_bos, "add_prefix_space": prefixed, "legacy": False}
    return {"tokenizer_class": "LlamaTokenizer", **flags, **names}
