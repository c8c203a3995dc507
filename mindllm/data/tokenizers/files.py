"""The files that make a tokenizer in a Hugging Face directory, copied beside exported weights."""

from __future__ import annotations

import json
from pathlib import Path

from mindllm.data.chat.template import PLAIN, chat_template_of
from mindllm.data.tokenizers.tokenizer import JsonTokenizer, Tokenizer
from mindllm.files import atomic_open
from mindllm.outside import read_bytes

COMPANIONS = (  # beside tokenizer.json or tokenizer.model
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
SPACE = "▁"  # sentencepiece's


def copy_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Copies the file of ``tokenizer`` and its companions into ``directory``.

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
    other = source.with_name("tokenizer.model" if source.suffix == ".json" else "tokenizer.json")
    is_named_so = source.stem == "tokenizer"  # or it is a tokenizer among others: what lies beside may be theirs
    for file in (other, *map(source.with_name, COMPANIONS)) if is_named_so else ():
        if file.is_file():
            _copy(file, directory / file.name)
    if not (directory / "tokenizer_config.json").exists():
        _write_config(directory, _config(tokenizer))


def _copy(source: Path, target: Path) -> None:
    with atomic_open(target, "wb") as file:
        file.write(read_bytes(source))


def _write_config(directory: Path, content: dict[str, str | bool]) -> None:
    with atomic_open(directory / "tokenizer_config.json") as target:
        json.dump(content, target, indent=2, ensure_ascii=False)


def _template(tokenizer: Tokenizer) -> dict[str, str]:
    """The chat template of the tokenizer, where it has one of its own."""
    found = chat_template_of(tokenizer)
    return {} if found.source == PLAIN else {"chat_template": found.source}


def _config(tokenizer: Tokenizer) -> dict[str, str | bool]:
    ids = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id, "pad_token": tokenizer.pad_id}
    names = {role: tokenizer.token(id) for role, id in ids.items() if id is not None}
    if isinstance(tokenizer, JsonTokenizer):
        return {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    prefixed = tokenizer.token(tokenizer.encode("a")[0]).startswith(SPACE)
    flags = {"add_bos_token": tokenizer.adds_bos, "add_prefix_space": prefixed, "legacy": False}
    return {"tokenizer_class": "LlamaTokenizer", **flags, **names}
