"""Small corpora for the tests of this room."""

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from mindllm.data import Corpus, CorpusWriter, IndexedWriter

EOD = 0


def byte_tokenizer(eos_id=EOD, fingerprint="bytes"):
    """A tokenizer whose tokens are the bytes of the text plus one; token 0 ends documents."""
    return SimpleNamespace(
        path=Path("bytes.json"),
        vocab_size=257,
        eos_id=eos_id,
        bos_id=None,
        fingerprint=fingerprint,
        encode=lambda text: [byte + 1 for byte in text.encode()],
        decode=lambda ids: bytes(id - 1 for id in ids).decode(errors="replace"),
    )


def write_texts(prefix, texts, tokenizer=None, append_eod=True):
    tokenizer = tokenizer or byte_tokenizer()
    with CorpusWriter(prefix, tokenizer, append_eod=append_eod, source_fingerprint="test") as writer:
        for text in texts:
            writer.append(np.array(tokenizer.encode(text), dtype=np.int64))
            writer.end_text(len(text.encode()))
    return Corpus(prefix, tokenizer)


def write_numbered(prefix, lengths):
    """A corpus as Megatron's tool leaves it, without extra files; token i of all is i."""
    ends = np.cumsum([0, *lengths])
    with IndexedWriter(prefix, np.int32) as writer:
        for first, last in pairwise(ends):
            writer.append(np.arange(first, last))
            writer.end_document()
    return Corpus(prefix)
