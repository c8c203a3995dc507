"""Cutting files into pieces loses no byte and changes no token; several workers give what one gives."""

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindllm.data import load_tokenizer, records
from mindllm.data.preprocess import pieces as pieces_module
from mindllm.data.preprocess.pieces import batched, cut, read
from mindllm.data.preprocess.resume import encode_pieces
from mindllm.data.preprocess.sources import DocumentReader, find_sources
from mindllm.data.tokenizers.sentencepiece_tokenizer import save_tokenizer, train_byte_level_bpe
from mindllm.data.tokenizers.tokenizer import is_cuttable
from mindllm.errors import UserError

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


def test_a_long_record_is_cut_where_its_text_would_be_as_a_file(tmp_path, tokenizer):
    """What a tokenizer is given at once is bounded: of a text of 108 MB it would take 13 GB."""
    sources = sources_of(tmp_path, CODE.encode())
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("short", CODE, "last")), encoding="utf-8")
    (source,) = find_sources([rows])
    pieces = list(cut([source], documents=DocumentReader()))
    assert max(piece.work for piece in pieces) <= 200
    assert [piece.content for piece in pieces[1:-1]] == [
        CODE.encode()[piece.start : piece.stop] for piece in cut(sources)
    ]
    assert sum(piece.last for piece in pieces) == 3
    assert sum(piece.size for piece in pieces) == source.size
    encoded = [token for part in encode_pieces(pieces[1:-1], tokenizer, workers=1) for token in part.tokens.tolist()]
    assert encoded == tokenizer.encode(CODE)


def test_what_cannot_be_cut_and_is_too_long_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(pieces_module, "UNSPLIT_BYTES", 2 << 20)
    long = "x " * (1 << 20) + "x"
    (tmp_path / "a.txt").write_text(long, encoding="utf-8")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(long.encode()))
    (tmp_path / "c.jsonl").write_text(
        json.dumps({"text": "short"}) + "\n" + json.dumps({"text": long}), encoding="utf-8"
    )
    for source, place in zip(find_sources([tmp_path]), ("a.txt", "b.txt.gz", "c.jsonl: record 2"), strict=True):
        with pytest.raises(UserError, match=f"{place}: is a document of more than 2 MB"):
            list(cut([source], cuttable=False, documents=DocumentReader()))
        assert len(list(cut([source], documents=DocumentReader()))) > 1000


def test_a_line_without_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "LINE_BYTES", 2 << 20)
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "short"}\n{"text": "' + "x" * (2 << 20) + '"}\n', encoding="utf-8")
    with pytest.raises(UserError, match=r"a\.jsonl: line 2 has more than 2 MB"):
        list(records.read_records(path))


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
        allowed_special_tokens = ()

        def encode(self, text):
            return [1, *tokenizer.encode(text)]

    assert is_cuttable(tokenizer)
    assert not is_cuttable(Prefixing())
    assert len(list(cut(sources_of(tmp_path, CODE.encode()), cuttable=False))) == 1
