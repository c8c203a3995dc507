"""Which tokens begin, end and pad a text, as the files beside a tokenizer of Hugging Face tell it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mindllm.errors import UserError

END_OF_TEXT = "<|endoftext|>"
USUAL_NAMES = {  # looked for where no file names the token
    "bos": ("<|begin_of_text|>", "<s>", "<bos>"),
    "eos": (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>"),
    "pad": ("<|pad|>", "<pad>", "[PAD]"),
}


@dataclass(frozen=True)
class SpecialTokens:
    """What is told: names of tokens and, where only generation_config.json knows, ids. ``adds_bos`` is None if untold."""

    names: dict[str, str] = field(default_factory=dict)
    ids: dict[str, int] = field(default_factory=dict)
    adds_bos: bool | None = None

    def id_of(
        self, role: str, vocabulary: Callable[[str], int | None], vocab_size: int, own: int | None = None
    ) -> int | None:
        """The id of the token of ``role`` (bos, eos, pad): named, told, the tokenizer's ``own``, or of a usual name.

        An id told that is not below ``vocab_size`` is the model's affair, not the tokenizer's.
        """
        if role in self.names:
            return vocabulary(self.names[role])
        if self.ids.get(role, vocab_size) < vocab_size:
            return self.ids[role]
        if own is not None:
            return own
        return next((id for name in USUAL_NAMES[role] if (id := vocabulary(name)) is not None), None)


def read_special_tokens(directory: Path) -> SpecialTokens:
    """Reads tokenizer_config.json, special_tokens_map.json and generation_config.json of ``directory``, as far as they are there.

    Raises:
        UserError: one of them is not an object in JSON.
    """
    config = _read(directory / "tokenizer_config.json")
    sources = (config, _read(directory / "special_tokens_map.json"))
    generation = _read(directory / "generation_config.json")
    names: dict[str, str] = {}
    ids: dict[str, int] = {}
    for role in USUAL_NAMES:
        named = next((token for source in sources if (token := source.get(f"{role}_token"))), None)
        if named:
            names[role] = named["content"] if isinstance(named, dict) else str(named)
        told = generation.get(f"{role}_token_id")
        first = next(iter(told), None) if isinstance(told, list) else told
        if isinstance(first, int) and first >= 0:
            ids[role] = first
    adds = config.get("add_bos_token")
    return SpecialTokens(names, ids, adds if isinstance(adds, bool) else None)


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON ({error})") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: holds no object of keys and values")
    return content
