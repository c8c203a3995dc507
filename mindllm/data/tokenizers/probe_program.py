"""Program that runs the steps of a tokenizer on difficult texts, within limits. ``limits`` starts it and passes the steps.

The file imports nothing of the project, so that it starts in a moment.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from typing import Any

GOOD = "good"
LENGTH = 1000  # characters of a text: enough for a search that is exponential or cubic to be seen
UNITS = ("a", "A", "1", " ", "\n", "\t", ".", "'", "_", "é", "中", "a ", "a1", "A.", "\r\n", " \n", "ab", "'s")
ENDS = ("", "!")
SHORT = ("", "a", "aab", "a b\n", "\0", "é中1")
MOST_LITERALS = 48  # characters of the patterns themselves that texts are made of
LONGEST_REASON = 200


def difficult_texts(patterns: list[str]) -> Iterator[str]:
    """Yield short texts, and long runs of characters that a pattern may repeat, with an end that it may not match."""
    yield from SHORT
    literals = sorted({character for pattern in patterns for character in pattern if character.isprintable()})
    for unit in dict.fromkeys([*UNITS, *literals[:MOST_LITERALS]]):
        for end in (*ENDS, "\n".join(["", *patterns])):  # an engine may look for words of the pattern first
            yield unit * (LENGTH // len(unit)) + end


def run(sections: dict[str, Any], patterns: list[str]) -> None:
    """Encode and decode difficult texts with these sections and a small vocabulary."""
    from tokenizers import Tokenizer

    model = {"type": "BPE", "vocab": {character: number for number, character in enumerate("ab1 .'▁Ġ")}, "merges": []}
    tokenizer = Tokenizer.from_str(json.dumps({"version": "1.0", "added_tokens": [], **sections, "model": model}))
    for text in difficult_texts(patterns):
        tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids)


def main() -> None:
    """Read a request from standard input and write GOOD, or why the steps fail."""
    request = json.load(sys.stdin)
    memory, seconds, patterns = request.pop("memory"), request.pop("seconds"), request.pop("patterns")
    os.environ.update(RAYON_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    except (ImportError, ValueError, OSError):
        pass  # a system without such limits keeps that of time
    try:
        run(request, patterns)
    except BaseException as error:  # panics of the library are not an Exception
        print(" ".join(str(error).split())[:LONGEST_REASON] or type(error).__name__)
        return
    print(GOOD)


if __name__ == "__main__":
    main()
