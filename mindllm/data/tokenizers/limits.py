"""Bounds of a ``tokenizer.json``. It is a program that may expand one character to any length, or search a text forever.

The growth of a text is computed from the steps that replace text. Regular expressions of unknown families first run in a separate
process with bounded time and memory.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mindllm.data.tokenizers import probe_program
from mindllm.data.tokenizers.vocabularies import PRE_TOKENIZERS
from mindllm.errors import UserError, shortened

LONGEST_TEXT = (
    32 << 20
)  # characters that a text has after normalization; the library takes over a hundred bytes for each
MOST_GROWTH = 1000  # characters that one character may become
MOST_ADDED = 10_000  # characters that a step puts in front of a text
MOST_STEPS = 256  # of normalizer, pre_tokenizer and decoder together; public tokenizers have up to twenty
LONGEST_WORD = 1000  # characters of a WordPiece word: all its parts are looked up, and public tokenizers have 100
LONGEST_CHARACTER = 64  # bytes that a charsmap writes for a character: Unicode's own longest one takes 33
MEMORY, CPU_SECONDS, SECONDS = 1 << 30, 5, 60  # of the process that tries regular expressions
EMPTY_MATCH = re.compile(r"[*?|^$]|\(\?|\\[bBAzZG]|\{0|\{,")  # a pattern without these matches at least one character
KNOWN_PATTERNS = frozenset(pattern for known in PRE_TOKENIZERS.values() for pattern in known.patterns)
NESTED = ("normalizers", "pretokenizers", "decoders")
SECTIONS = ("normalizer", "pre_tokenizer", "decoder")
START = "import sys, runpy; sys.path[:] = {paths}; runpy.run_path({file!r}, run_name='__main__')"


def check_bounds(content: Any, path: Path) -> float:
    """Return the largest number of characters that a tokenizer makes of one.

    Raises:
        UserError: a text may grow without bound, a step has no bound, or a regular expression fails or takes too long.
    """
    if not isinstance(content, dict):
        raise UserError(f"{path}: not a tokenizer.json (not an object)")
    steps = {section: list(_steps(content.get(section))) for section in SECTIONS}
    count = sum(map(len, steps.values()))
    if count > MOST_STEPS:
        raise UserError(
            f"{path}: normalizer, pre_tokenizer and decoder have {count:,} steps; at most {MOST_STEPS} are run"
        )
    growth, *_ = [_growth(section, steps[section], path) for section in SECTIONS]
    added = content.get("added_tokens")
    tokens = (token for token in added if isinstance(token, dict)) if isinstance(added, list) else ()
    length = sum(len(str(token.get("content"))) for token in tokens) * growth
    if length > LONGEST_TEXT:
        raise UserError(f"{path}: added_tokens: may have {length:,.0f} characters; at most {LONGEST_TEXT:,} are read")
    word = content["model"].get("max_input_chars_per_word") if isinstance(content.get("model"), dict) else None
    if isinstance(word, int | float) and word > LONGEST_WORD:
        raise UserError(
            f"{path}: model.max_input_chars_per_word: must be at most {LONGEST_WORD} (value {shortened(word)})"
        )
    patterns = [pattern for section in SECTIONS for step in steps[section] if (pattern := _pattern(step, "Regex"))]
    if not KNOWN_PATTERNS.issuperset(patterns):
        _try_apart({section: content.get(section) for section in SECTIONS}, patterns, path)
    return growth


def _steps(section: Any) -> Iterator[dict[str, Any]]:
    """Yield the steps of a section, those of sequences one by one."""
    if isinstance(section, list):
        for entry in section:
            yield from _steps(entry)
    elif isinstance(section, dict):
        yield section
        for key in NESTED:
            yield from _steps(section.get(key))


def _pattern(step: dict[str, Any], kind: str) -> str | None:
    pattern = step.get("pattern")
    value = pattern.get(kind) if isinstance(pattern, dict) else None
    return value if isinstance(value, str) else None


def _growth(section: str, steps: list[dict[str, Any]], path: Path) -> float:
    """Return the largest number of characters that a section makes of one; raises UserError if it is too large."""
    growth, added = 1.0, 0.0
    for step in steps:
        factor = _factor(step)
        growth, added = growth * factor, added * factor + len(str(step.get("prepend") or ""))
        if growth > MOST_GROWTH or added > MOST_ADDED:
            size = (
                f"{growth:.3g} characters of one"
                if growth > MOST_GROWTH
                else f"{added:.3g} characters of an empty text"
            )
            raise UserError(
                f"{path}: {section}: its steps may make {size}; the limits are {MOST_GROWTH} and {MOST_ADDED}"
            )
    return growth


def _factor(step: dict[str, Any]) -> float:
    """Return how many characters of one a step makes at most, those that Unicode defines left out."""
    if charsmap := step.get("precompiled_charsmap"):
        longest = _longest_character(charsmap)
        return longest if longest > LONGEST_CHARACTER else 1.0
    written = step.get("content")
    if not isinstance(written, str):
        return 1.0
    literal, regex = _pattern(step, "String"), _pattern(step, "Regex")
    if not literal and not regex:
        return math.inf  # written between all characters, again and again
    if literal:
        return max(1.0, len(written) / len(literal))
    may_be_empty = regex is None or EMPTY_MATCH.search(regex) is not None
    return max(1.0, len(written) + (1 if may_be_empty and written else 0))


def _longest_character(charsmap: Any) -> int:
    """Return the length in bytes of the longest text in sentencepiece's map of characters; 0 for one that is none."""
    try:
        content = base64.b64decode(charsmap, validate=True)
    except (TypeError, ValueError, binascii.Error):
        return 0  # the library refuses it
    texts = content[4 + int.from_bytes(content[:4], "little") :]
    return max(map(len, texts.split(b"\0")))


def _try_apart(sections: dict[str, Any], patterns: list[str], path: Path) -> None:
    """Run sections of a tokenizer on difficult texts in a separate process; raise UserError if they fail."""
    start = START.format(paths=json.dumps(sys.path), file=probe_program.__file__)
    request = {**sections, "patterns": patterns, "memory": MEMORY, "seconds": CPU_SECONDS}
    try:
        result = subprocess.run(
            [sys.executable, "-I", "-c", start],
            input=json.dumps(request).encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        reason = f"they take over {SECONDS} seconds"
    else:
        answer = result.stdout.decode(errors="replace").strip()
        if answer == probe_program.GOOD:
            return
        reason = answer or f"they take over {CPU_SECONDS} seconds or {MEMORY >> 20} MiB (exit code {result.returncode})"
    shown = ", ".join(map(shortened, patterns[:3]))
    raise UserError(
        f"{path}: not a tokenizer.json that can be run: on a short text its steps fail ({reason}); patterns: {shown}"
    )
