"""What MindSpore's parser has made of sources, handed from one process to the next: reading them takes a quarter of a compile.

The parser keeps the syntax tree of every function under a hash of its text. Trees are made again from the texts, which are
small, so nothing that another process wrote is executed, and no text can be taken for another.
"""

from __future__ import annotations

import gc
import json
from pathlib import Path


def write_parsed(path: Path) -> None:
    """Write the texts this process has parsed: by hash, the text without its indentation, and the width of that."""
    from mindspore.graph._parse.parser import Parser

    texts = {key: (tokens.text, indentation) for key, (tokens, indentation) in Parser.ast_cache.items()}
    path.write_text(json.dumps(texts), encoding="utf-8")


def read_parsed(path: Path) -> None:
    """Parse these texts, so that this process and all it forks will not have to."""
    import asttokens
    from mindspore.graph._parse.parser import Parser

    for key, (text, indentation) in json.loads(path.read_text(encoding="utf-8")).items():
        if key not in Parser.ast_cache:
            Parser.ast_cache[key] = (asttokens.ASTTokens(text, parse=True), indentation)
    gc.freeze()  # forks need not search what lives as long as they do
