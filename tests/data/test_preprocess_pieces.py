"""Cutting files into pieces loses no byte and changes no token; several workers give what one gives."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindllm.data import load_tokenizer
from mindllm.data.tokenizer import is_cuttable
from mindllm.data.tokenizer_training import save_tokenizer, train_byte_level_bpe
from toolkit.data_preprocess import pieces as pieces_module
from toolkit.data_preprocess.encode import encode_pieces
from toolkit.data_preprocess.pieces import batched, cut, read
from toolkit.data_preprocess.sources import find_sources

LINES = ["if x:", "    return x + 1", "", "  ", "été = 'é'", "value = 12345", "\treturn  value  ", "\u3000wide"]
CODE = "\n".join(LINES * 400)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    save_tokenizer(train_byte_level_bpe([CODE], 285), path)
    return load_tokenizer(path)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(pieces_module, "PIECE_BYTES", 100)


def sources_of(tmp_path, *texts):
    for number, text in enumerate(texts):
        (tmp_path / f"{number:03d}.txt").write_bytes(text)
    return find_sources([tmp_path])


@settings(max_examples=50)
@given(
    texts=st.lists(
        st.one_of(
            st.binary(max_size=1000),
            st.lists(st.sampled_from(LINES), max_size=200).map(lambda lines: "\n".join(lines).encode()),
            st.integers(0, 300).map(lambda count: ("é" * count).encode()),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_pieces_are_the_files(tmp_path_factory, texts):
    sources = sources_of(tmp_path_factory.mktemp("files"), *texts)
    found: list[bytes] = [b""]
    for piece in cut(sources):
        found[-1] += Path(piece.path).read_bytes()[piece.start : piece.stop]
        assert piece.size <= 200
        if piece.last:
            found.append(b"")
    assert found[:-1] == texts
    assert [piece for batch in batched(cut(sources)) for piece in batch] == list(cut(sources))
    valid = [text for text in texts if text == text.decode(errors="replace").encode()]
    if valid == texts:
        assert all(read(piece).is_valid for piece in cut(sources))


def test_pieces_change_no_token(tmp_path, tokenizer):
    sources = sources_of(tmp_path, CODE.encode())
    pieces = list(cut(sources))
    assert len(pieces) > 50
    encoded = [token for part in encode_pieces(pieces, tokenizer, workers=1) for token in part.tokens.tolist()]
    assert encoded == tokenizer.encode(CODE)


def test_workers_give_what_one_process_gives(tmp_path, tokenizer):
    sources = sources_of(tmp_path, *[(CODE[: 37 * number]).encode() for number in range(60)], b"caf\xe9")
    alone = list(encode_pieces(cut(sources), tokenizer, workers=1))
    together = list(encode_pieces(cut(sources), tokenizer, workers=2))
    assert [part.piece for part in together] == [part.piece for part in alone]
    assert [part.tokens.tolist() for part in together] == [part.tokens.tolist() for part in alone]
    assert [part.byte_count for part in together] == [part.byte_count for part in alone]
    assert [part.is_valid for part in together] == [part.is_valid for part in alone]


def test_tokenizers_with_a_prefix_are_not_cut(tmp_path, tokenizer):
    class Prefixing:
        def encode(self, text):
            return [1, *tokenizer.encode(text)]

    assert is_cuttable(tokenizer)
    assert not is_cuttable(Prefixing())
    assert len(list(cut(sources_of(tmp_path, CODE.encode()), cuttable=False))) == 1
