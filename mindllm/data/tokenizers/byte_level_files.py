"""Byte-level tokenizers of other files than ``tokenizer.json``, as the content of one: tiktoken's ranks, GPT-2's two files."""

from __future__ import annotations

import base64
import binascii
import json
from pathlib import Path
from typing import Any

from mindllm.data.tokenizers.known import KNOWN, known_tokenizer
from mindllm.data.tokenizers.special_tokens import END_OF_TEXT, AddedToken, SpecialTokens
from mindllm.errors import UserError
from mindllm.families.hugging_face import read_json
from mindllm.outside import bounded_lines, open_file, read_text
from mindllm.units import MIB

MERGES = "merges.txt"
TIKTOKEN_CLASS = "QWenTokenizer"  # whose file is named *.tiktoken, also where no tokenizer_config.json is beside it


def is_tiktoken(path: Path) -> bool:
    """Whether a file holds lines of base64 and a rank: ``qwen.tiktoken``, and ``tokenizer.model`` of GLM-4."""
    with open_file(path) as file:
        fields = file.read(1024).split(b"\n")[0].split(b" ")
    try:
        return len(fields) == 2 and fields[1].strip().isdigit() and bool(base64.b64decode(fields[0], validate=True))
    except binascii.Error:
        return False


def content_of_tiktoken(path: Path, special: SpecialTokens) -> dict[str, Any]:
    """The content of a ``tokenizer.json`` that encodes as tiktoken does with the ranks in ``path``.

    How texts are cut before and which tokens are special stands in code; what is known of it is in :mod:`known_tokenizers`.

    Raises:
        UserError: the file is damaged, or of a class that is not known.
    """
    tokenizer_class = special.tokenizer_class or TIKTOKEN_CLASS
    known = known_tokenizer(tokenizer_class)
    if not known.pattern:
        names = ", ".join(name for name, entry in KNOWN.items() if entry.pattern)
        raise UserError(
            f"{path}: how {tokenizer_class} cuts texts stands in Python code, which is not run (known: {names}); "
            "convert it to a tokenizer.json with transformers"
        )
    ranks = _ranks(path)
    spelled = _characters()
    vocabulary = {"".join(spelled[byte] for byte in token): rank for token, rank in ranks.items()}
    added = {name: len(ranks) + index for index, name in enumerate(known.appended)}
    tokens = [AddedToken(name, id) for name, id in added.items()]
    tokens = [*{token.id: token for token in (*tokens, *special.added)}.values()]
    split = {"type": "Split", "pattern": {"Regex": known.pattern}, "behavior": "Isolated", "invert": False}
    return {
        **content_of(vocabulary, _merges(ranks, spelled), tokens),
        "normalizer": {"type": "NFC"} if known.nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level(use_regex=False)]},
    }


def content_of_vocabulary(path: Path, special: SpecialTokens) -> dict[str, Any]:
    """The content of a ``tokenizer.json`` of GPT-2's ``vocab.json`` and the ``merges.txt`` beside it.

    Raises:
        UserError: one of the files is missing or damaged.
    """
    vocabulary, file = read_json(path), path.with_name(MERGES)
    if not vocabulary or not all(type(id) is int and id >= 0 for id in vocabulary.values()):
        raise UserError(f"{path}: must be an object of tokens and their ids")
    try:
        lines = read_text(file).split("\n")
    except FileNotFoundError:
        raise UserError(f"{path}: {MERGES} is missing beside it") from None
    except OSError as error:
        raise UserError(f"{file}: not the merges of a tokenizer ({error.strerror})") from None
    merges = [line.split(" ") for line in lines if line and not line.startswith("#version")]
    for merge in merges:
        if len(merge) != 2 or "".join(merge) not in vocabulary:
            raise UserError(f"{file}: not a merge of tokens in {path.name}: {' '.join(merge)[:60]}")
    named = {*special.names.values(), *special.more_names, END_OF_TEXT}
    tokens = [AddedToken(name, vocabulary[name]) for name in sorted(named) if name in vocabulary]
    tokens = [*{token.id: token for token in (*tokens, *special.added)}.values()]
    content = content_of(vocabulary, merges, tokens)
    return {
        **content,
        "normalizer": None,
        "pre_tokenizer": byte_level(use_regex=True),
        "model": {**content["model"], "ignore_merges": False},
    }


def _ranks(path: Path) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    with open_file(path) as file:
        for number, line in enumerate(bounded_lines(file, MIB, path), 1):
            if not line.strip():
                continue
            try:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
            except (ValueError, binascii.Error):
                raise UserError(f"{path}, line {number}: not a token in base64 and its rank") from None
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing or sorted(ranks.values()) != list(range(len(ranks))):
        raise UserError(f"{path}: not whole: it must have all 256 bytes, and ranks from 0 on without gaps")
    return ranks


def _merges(ranks: dict[bytes, int], spelled: dict[int, str]) -> list[list[str]]:
    """Every way to make a token of two, by the rank of the token: two neighbours are joined where that rank is the lowest."""
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        halves = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        pairs = [pair for pair in halves if pair[0] in ranks and pair[1] in ranks]
        for pair in sorted(pairs, key=lambda pair: (ranks[pair[0]], ranks[pair[1]])):
            merges.append(["".join(spelled[byte] for byte in half) for half in pair])
    return merges


def _characters() -> dict[int, str]:
    """GPT-2's visible character for every byte: itself where it is visible, else one of those from U+0100 on."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in visible]
    return {byte: chr(byte) for byte in visible} | {byte: chr(256 + index) for index, byte in enumerate(others)}


def byte_level(use_regex: bool) -> dict[str, Any]:
    """A step that spells bytes as characters; with ``use_regex`` it cuts texts into GPT-2's words before."""
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": use_regex}


def content_of(vocabulary: dict[str, int], merges: list[list[str]], added: list[AddedToken]) -> dict[str, Any]:
    """A ``tokenizer.json`` of BPE whose texts are not cut yet."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": token.id, "content": token.name, "special": token.special, **flags}
            for token in sorted(added, key=lambda token: token.id)
        ],
        "post_processor": None,
        "decoder": byte_level(use_regex=True),
        "model": {"type": "BPE", "ignore_merges": True, "vocab": vocabulary, "merges": merges},
    }


def spelled(content: dict[str, Any]) -> str:
    """The text of a ``tokenizer.json``."""
    return json.dumps(content, ensure_ascii=False)
