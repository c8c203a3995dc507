"""Vocabularies of other formats as the content of a ``tokenizer.json``: tiktoken, GPT-2's files, and GGUF.

A GGUF file has byte-level BPE or SentencePiece BPE. It names the rule that splits texts before merges; :data:`PRE_TOKENIZERS` has
the rules.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindllm.data.tokenizers.special_tokens import (
    CL100K,
    END_OF_TEXT,
    KNOWN,
    QWEN,
    AddedToken,
    SpecialTokens,
    known_tokenizer,
)
from mindllm.errors import UserError, shortened
from mindllm.families.hugging_face import read_json
from mindllm.gguf import Header, read_header
from mindllm.outside import bounded_lines, open_file, read_text
from mindllm.units import MIB

MERGES = "merges.txt"
TIKTOKEN_CLASS = "QWenTokenizer"  # of a *.tiktoken file without tokenizer_config.json


def is_tiktoken(path: Path) -> bool:
    """Return True if a file has lines of base64 and a rank: ``qwen.tiktoken``, and ``tokenizer.model`` of GLM-4."""
    with open_file(path) as file:
        fields = file.read(1024).split(b"\n")[0].split(b" ")
    try:
        return len(fields) == 2 and fields[1].strip().isdigit() and bool(base64.b64decode(fields[0], validate=True))
    except binascii.Error:
        return False


def tiktoken_content(path: Path, special: SpecialTokens) -> dict[str, Any]:
    """Return the content of a ``tokenizer.json`` that encodes like tiktoken with the ranks in ``path``.

    The code of the tokenizer class has the split of texts and the special tokens: see :func:`known_tokenizer`.

    Raises:
        UserError: the file is damaged, or of an unknown class.
    """
    tokenizer_class = special.tokenizer_class or TIKTOKEN_CLASS
    class_tokens = known_tokenizer(tokenizer_class)
    if not class_tokens.pattern:
        names = ", ".join(name for name, entry in KNOWN.items() if entry.pattern)
        raise UserError(
            f"{path}: how {tokenizer_class} cuts texts stands in Python code, which is not run (known: {names}); "
            "convert it to a tokenizer.json with transformers"
        )
    ranks = _ranks(path)
    spelled = byte_characters()
    vocabulary = {"".join(spelled[byte] for byte in token): rank for token, rank in ranks.items()}
    added = {name: len(ranks) + index for index, name in enumerate(class_tokens.appended)}
    tokens = [AddedToken(name, id) for name, id in added.items()]
    tokens = [*{token.id: token for token in (*tokens, *special.added)}.values()]
    split = {"type": "Split", "pattern": {"Regex": class_tokens.pattern}, "behavior": "Isolated", "invert": False}
    return {
        **content_of(vocabulary, _ranked_merges(ranks, spelled), tokens),
        "normalizer": {"type": "NFC"} if class_tokens.nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level(use_regex=False)]},
    }


def byte_characters() -> dict[int, str]:
    """Return GPT-2's visible character for every byte: the byte if it is visible, else a character from U+0100 on."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    invisible = [byte for byte in range(256) if byte not in visible]
    return {byte: chr(byte) for byte in visible} | {byte: chr(256 + index) for index, byte in enumerate(invisible)}


def vocabulary_content(path: Path, special: SpecialTokens) -> dict[str, Any]:
    """Return the content of a ``tokenizer.json`` for GPT-2's ``vocab.json`` and ``merges.txt`` in one directory.

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


def _ranked_merges(ranks: dict[bytes, int], spelled: dict[int, str]) -> list[list[str]]:
    """Return every split of a token into two, by the rank of the token: the lowest rank is merged first."""
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        halves = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        pairs = [pair for pair in halves if pair[0] in ranks and pair[1] in ranks]
        for pair in sorted(pairs, key=lambda pair: (ranks[pair[0]], ranks[pair[1]])):
            merges.append(["".join(spelled[byte] for byte in half) for half in pair])
    return merges


def byte_level(use_regex: bool) -> dict[str, Any]:
    """Return the step that spells bytes as characters; with ``use_regex`` it first splits texts into GPT-2's words."""
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": use_regex}


def content_of(vocabulary: dict[str, int], merges: list[list[str]], added: list[AddedToken]) -> dict[str, Any]:
    """Return a ``tokenizer.json`` of BPE without a split of texts."""
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
    """Return the text of a ``tokenizer.json``."""
    return json.dumps(content, ensure_ascii=False)


PREFIX = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # tokenizer.ggml.token_type
SPACE = "▁"
QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")
DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)


@dataclass(frozen=True)
class PreTokenizer:
    """How texts are cut before merges: by each of ``patterns`` in turn, by GPT-2's words where ``words``; then by bytes.

    ``whole``: a piece that is a token is that token, whatever its merges say. ``nfc``: texts are normalised so. ``adds_bos``:
    where the file does not say.
    """

    patterns: tuple[str, ...] = ()
    words: bool = False
    whole: bool = False
    nfc: bool = False
    adds_bos: bool = False


LLAMA3 = PreTokenizer((CL100K,), whole=True, adds_bos=True)
QWEN2 = PreTokenizer((QWEN,), nfc=True)
GPT2 = PreTokenizer(words=True)
DIGITS = PreTokenizer((r"\p{N}",), words=True)
PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3"), LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), QWEN2),
    "qwen35": PreTokenizer((QWEN35,), nfc=True),
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt"), GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "minerva-7b"), DIGITS),
    "tekken": PreTokenizer((TEKKEN,), whole=True, adds_bos=True),
    "deepseek-coder": PreTokenizer(DEEPSEEK_CODER),
    "deepseek-v3": PreTokenizer(DEEPSEEK3),
}
UNNAMED = {"qwen2": QWEN2, "qwen2moe": QWEN2, "qwen3": QWEN2, "qwen3moe": QWEN2}
"""By architecture, of files from before ``tokenizer.ggml.pre`` was written."""


def gguf_special_tokens(path: Path) -> SpecialTokens:
    """Return the special tokens in a GGUF file; errors as in :func:`gguf_content`."""
    header = read_header(path)
    tokens = _tokens(header)
    ids = {"bos": "bos", "eos": "eos", "pad": "padding"}
    ids_by_role = {role: header.get(f"{PREFIX}{name}_token_id", int) for role, name in ids.items()}
    names = {role: tokens[id] for role, id in ids_by_role.items() if id is not None and 0 <= id < len(tokens)}
    return SpecialTokens(names=names, adds_bos=_adds_bos(header))


def gguf_chat_template(path: Path, name: str = "") -> str:
    """Return the chat template in a GGUF file, or the one of this name; empty where it has none."""
    return read_header(path).get(f"tokenizer.chat_template{'.' * bool(name)}{name}", str, "")


def gguf_content(path: Path) -> dict[str, Any]:
    """Return the content of a ``tokenizer.json`` that encodes like the tokenizer in a GGUF file.

    Raises:
        UserError: there is none, it is damaged, of an unsupported kind, or splits texts in an unknown way.
    """
    header = read_header(path)
    model, tokens = header.get(f"{PREFIX}model", str, ""), _tokens(header)
    types = header.get(f"{PREFIX}token_type", list, [NORMAL] * len(tokens))
    if len(types) != len(tokens):
        raise UserError(f"{path}: {PREFIX}token_type: must have an entry for each of the {len(tokens)} tokens")
    vocabulary = {name: id for id, name in reversed([*enumerate(tokens)]) if types[id] != UNUSED}
    added = [
        AddedToken(name, id, types[id] != USER_DEFINED)
        for name, id in vocabulary.items()
        if (name and types[id] in (CONTROL, USER_DEFINED)) or (types[id] == UNKNOWN and model == "llama")
    ]
    if model == "gpt2":
        content = _byte_level_content(header, vocabulary, added)
    elif model == "llama":
        content = _sentencepiece_content(header, vocabulary, types, added)
    else:
        raise UserError(f"{path}: {PREFIX}model: not read (value {shortened(model)}); read are gpt2, llama")
    return {**content, "post_processor": _post_processor(header, tokens)}


def _tokens(header: Header) -> list[str]:
    tokens = header.get(f"{PREFIX}tokens", list)
    if not tokens or not isinstance(tokens[0], str):
        raise UserError(f"{header.path}: {PREFIX}tokens: missing; the file holds no tokenizer, name one beside it")
    return tokens


def _byte_level_content(header: Header, vocabulary: dict[str, int], added: list[AddedToken]) -> dict[str, Any]:
    pre = _pre_tokenizer(header)
    merges = [merge.split(" ", 1) for merge in header.get(f"{PREFIX}merges", list, [])]
    for merge in merges:
        if len(merge) != 2 or "".join(merge) not in vocabulary or not {*merge} <= vocabulary.keys():
            raise UserError(f"{header.path}: {PREFIX}merges: not a merge of its tokens ({shortened(' '.join(merge))})")
    content = content_of(vocabulary, merges, added)
    splits = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in pre.patterns
    ]
    return {
        **content,
        "normalizer": {"type": "NFC"} if pre.nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, byte_level(use_regex=pre.words)]},
        "model": {**content["model"], "ignore_merges": pre.whole},
    }


def _pre_tokenizer(header: Header) -> PreTokenizer:
    name = header.get(f"{PREFIX}pre", str, "")
    rule = PRE_TOKENIZERS.get(name) or (UNNAMED.get(header.architecture) if name in ("", "default") else None)
    if rule is None:
        names = ", ".join(PRE_TOKENIZERS)
        raise UserError(
            f"{header.path}: {PREFIX}pre: how this tokenizer cuts texts is not known (value {shortened(name) or 'none'}); known "
            f"are {names}; name a tokenizer.json instead"
        )
    return rule


def _sentencepiece_content(
    header: Header, vocabulary: dict[str, int], types: list[int], added: list[AddedToken]
) -> dict[str, Any]:
    scores = header.get(f"{PREFIX}scores", list)
    if scores is None or len(scores) < len(types):
        raise UserError(f"{header.path}: {PREFIX}scores: must have an entry for each of the {len(types)} tokens")
    unknown = next((name for name, id in vocabulary.items() if types[id] == UNKNOWN), None)
    prefixed = header.get(f"{PREFIX}add_space_prefix", bool, True)
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    prepend = [{"type": "Prepend", "prepend": SPACE}] if prefixed else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefixed else []
    content = content_of(vocabulary, _merges(vocabulary, types, scores), added)
    decoders = [{"type": "Replace", "pattern": {"String": SPACE}, "content": " "}, {"type": "ByteFallback"}]
    return {
        **content,
        "normalizer": {"type": "Sequence", "normalizers": [*prepend, replace]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [*decoders, {"type": "Fuse"}, *strip]},
        "model": {
            **content["model"],
            "unk_token": unknown,
            "fuse_unk": True,
            "byte_fallback": BYTE in types,
            "ignore_merges": False,
        },
    }


def _merges(vocabulary: Mapping[str, int], types: list[int], scores: list[float]) -> list[list[str]]:
    """Return every split of a token into two, in the order of SentencePiece: the highest score is merged first."""
    pieces = {name: id for name, id in vocabulary.items() if types[id] == NORMAL}
    splits = [
        (-scores[id], pieces[name[:cut]], pieces[name[cut:]], name[:cut], name[cut:])
        for name, id in pieces.items()
        for cut in range(1, len(name))
        if name[:cut] in pieces and name[cut:] in pieces
    ]
    return [[first, right] for *_, first, right in sorted(splits)]


def _adds_bos(header: Header) -> bool:
    flag = header.get(f"{PREFIX}add_bos_token", bool)
    if flag is not None:
        return flag
    return header.get(f"{PREFIX}model", str, "") != "gpt2" or _pre_tokenizer(header).adds_bos


def _post_processor(header: Header, tokens: list[str]) -> dict[str, Any] | None:
    """Return the post-processor that puts the beginning-of-text token before a text, as transformers does for the file."""
    bos = header.get(f"{PREFIX}bos_token_id", int)
    if bos is None or not 0 <= bos < len(tokens) or not _adds_bos(header):
        return None
    first, text = {"SpecialToken": {"id": tokens[bos], "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    second = [{"SpecialToken": {"id": tokens[bos], "type_id": 1}}, {"Sequence": {"id": "B", "type_id": 1}}]
    named = {tokens[bos]: {"id": tokens[bos], "ids": [bos], "tokens": [tokens[bos]]}}
    return {
        "type": "TemplateProcessing",
        "single": [first, text],
        "pair": [first, text, *second],
        "special_tokens": named,
    }
