"""JSON from outside: what is wrong with it is a ValueError in plain words, whatever the text holds."""

from __future__ import annotations

import json
import re
from typing import Any

SURROGATE = re.compile(r"\\u[dD][89a-fA-F]|[\ud800-\udfff]")
"""Half of a pair, written as an escape or come from bytes that are no UTF-8."""


def parse_json(content: bytes | str) -> Any:
    r"""The value that ``content`` (UTF-8, perhaps with a byte order mark) is.

    Raises:
        ValueError: it is no JSON, is nested too deeply, has an integer of thousands of digits, or a text with half a surrogate
            pair (``"\ud800"``), which no tokenizer and no file takes.
    """
    try:
        text = content if isinstance(content, str) else content.decode("utf-8-sig")
        tree = json.loads(text)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: byte {error.object[error.start]:#04x} at {error.start}") from None
    except json.JSONDecodeError as error:
        raise ValueError(str(error)) from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except ValueError:  # the only other one: of converting digits
        raise ValueError("an integer of thousands of digits") from None
    if SURROGATE.search(text) and (half := _half_pair(tree)):
        raise ValueError(f"half of a surrogate pair ({half}) in a text")
    return tree


def half_surrogate(text: str) -> str:
    r"""The first half of a surrogate pair in ``text``, as ``\ud800``; empty where there is none, and ``text`` is UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"\\u{ord(text[error.start]):04x}"
    return ""


def _half_pair(tree: Any) -> str:
    try:
        return half_surrogate(json.dumps(tree, ensure_ascii=False))
    except RecursionError:
        return ""
