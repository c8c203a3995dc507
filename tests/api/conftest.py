"""A small corpus where the shipped tiny configuration looks for it, and the small run of other tests."""

import sysconfig
from pathlib import Path

import pytest

from mindllm.data import CorpusWriter, load_tokenizer
from mindllm.data.tokenizers.sentencepiece_tokenizer import save_tokenizer, train_byte_level_bpe


@pytest.fixture(scope="session")
def workplace(tmp_path_factory):
    """A directory with ``data/stdlib/corpus`` and its tokenizer, as ``scripts/quickstart.sh`` makes them of more files."""
    directory = tmp_path_factory.mktemp("workplace")
    (directory / "data" / "stdlib").mkdir(parents=True)
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-d]*.py"))
    texts = [path.read_text(encoding="utf-8") for path in sources]
    save_tokenizer(train_byte_level_bpe(texts, 512), directory / "data/stdlib/tokenizer.json")
    tokenizer = load_tokenizer(directory / "data/stdlib/tokenizer.json")
    with CorpusWriter(
        directory / "data/stdlib/corpus", tokenizer, append_eod=True, source_fingerprint="small"
    ) as writer:
        for text in texts:
            writer.append(tokenizer.encode(text))
            writer.end_text(len(text.encode()))
    return directory
