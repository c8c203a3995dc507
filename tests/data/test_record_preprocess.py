"""Files of records to a corpus: every kind and compression gives the documents of the plain file; mistakes are named."""

import bz2
import csv
import gzip
import json
import lzma

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindllm.cli.data import main
from mindllm.data import Corpus, IndexedDataset, load_tokenizer
from mindllm.data.corpus import corpus_files
from mindllm.data.preprocess import pieces as pieces_module
from mindllm.data.preprocess import resume as resume_module
from mindllm.data.preprocess.sources import DocumentReader
from mindllm.data.records import RecordTable, read_records
from mindllm.data.tokenizers.sentencepiece_tokenizer import save_tokenizer, train_byte_level_bpe
from mindllm.errors import UserError

TEXTS = [f'Document {i}.\nIts été line, "quoted", with a comma; {"x" * (i % 50)}\n' for i in range(60)]
RECORDS = [{"text": text, "title": f"T{i}", "number": i} for i, text in enumerate(TEXTS)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    save_tokenizer(train_byte_level_bpe(TEXTS, 290), path)
    return load_tokenizer(path)


def jsonl(records=RECORDS):
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def write_csv(path, delimiter=","):
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["title", "text", "number"], delimiter=delimiter)
        writer.writeheader()
        writer.writerows(RECORDS)


def write_parquet(path):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(RECORDS), path, row_group_size=7)


def write_zst(path):
    import zstandard

    path.write_bytes(zstandard.ZstdCompressor().compress(jsonl()))


KINDS = {
    "a.jsonl": lambda path: path.write_bytes(jsonl()),
    "a.json": lambda path: path.write_text(json.dumps(RECORDS, indent=1)),
    "a.csv": write_csv,
    "a.tsv": lambda path: write_csv(path, "\t"),
    "a.parquet": write_parquet,
    "a.jsonl.gz": lambda path: path.write_bytes(gzip.compress(jsonl())),
    "a.jsonl.bz2": lambda path: path.write_bytes(bz2.compress(jsonl())),
    "a.jsonl.xz": lambda path: path.write_bytes(lzma.compress(jsonl())),
    "a.jsonl.zst": write_zst,
}


def make(tokenizer, prefix, *arguments):
    assert main([*map(str, arguments), "--tokenizer", str(tokenizer.path), "--output-prefix", str(prefix)]) == 0
    return Corpus(prefix, tokenizer)


def texts_of(corpus):
    return [corpus.tokenizer.decode(document[:-1].tolist()) for document in corpus.dataset]


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_file_gives_the_same_documents(tokenizer, tmp_path, name):
    KINDS[name](tmp_path / name)
    corpus = make(tokenizer, tmp_path / "c", tmp_path / name)
    assert texts_of(corpus) == TEXTS
    assert corpus.meta.bytes == sum(len(text.encode()) for text in TEXTS)
    assert [record["title"] for record in read_records(tmp_path / name)] == [f"T{i}" for i in range(60)]
    table = RecordTable([tmp_path / name, tmp_path / name])
    assert [table[number]["text"] for number in (59, 3, 60, 63)] == [TEXTS[59], TEXTS[3], TEXTS[0], TEXTS[3]]


def test_several_keys_are_one_document_and_empty_records_are_counted(tokenizer, tmp_path, capsys):
    (tmp_path / "a.jsonl").write_bytes(jsonl([*RECORDS[:3], {"title": None, "text": ""}]))
    corpus = make(tokenizer, tmp_path / "c", tmp_path / "a.jsonl", "--json-keys", "title", "text", "--json")
    assert texts_of(corpus) == [f"T{i}\n{TEXTS[i]}" for i in range(3)]
    assert json.loads(capsys.readouterr().out)["empty"] == 1
    whole = make(tokenizer, tmp_path / "d", tmp_path / "a.jsonl", "--format", "text")
    assert texts_of(whole) == [(tmp_path / "a.jsonl").read_text()]


def test_handlers_of_pretraining():
    def text(handler, record):
        return DocumentReader(handler=handler).text(record, "row 0")

    assert text("GeneralPretrainHandler", {"text": "t"}) == "t"
    alpaca = {"instruction": "q", "input": "x", "output": "a"}
    assert text("AlpacaPretrainHandler", alpaca) == "### Instruction:\nq\nx\n\n### Response:\na"
    question = {"title": "t", "question_body": "q", "answer_body": "a"}
    assert "### Question:\nq\n### Response:\na" in text("StackOverflowPythonPretrainHandler", question)


@given(st.lists(st.sampled_from(["short\n", "été é" * 40, "a line of text\nand another\n" * 20, ""]), max_size=12))
def test_compressed_text_is_cut_where_the_plain_file_is(tmp_path_factory, parts):
    from mindllm.data.preprocess.sources import find_sources

    directory = tmp_path_factory.mktemp("files")
    content = "".join(parts).encode()
    (directory / "a.txt").write_bytes(content)
    (directory / "b.txt.gz").write_bytes(gzip.compress(content))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces_module, "PIECE_BYTES", 100)
        plain, packed = ([*pieces_module.cut([source])] for source in find_sources([directory]))
    assert [content[piece.start : piece.stop] for piece in plain] == [piece.content for piece in packed]
    assert [piece.last for piece in plain] == [piece.last for piece in packed]


@pytest.mark.parametrize("stop", [1, 7, 30])
def test_an_error_in_the_middle_is_mended_and_the_rest_goes_on(tokenizer, tmp_path, monkeypatch, stop):
    """Records that cannot be read stop the run; what was saved before is used, byte for byte."""
    monkeypatch.setattr(resume_module, "SAVE_BYTES", 200)
    path = tmp_path / "a.jsonl"
    path.write_bytes(jsonl(RECORDS[:stop]) + b"{broken\n" + jsonl(RECORDS[stop + 1 :]))
    with pytest.raises(UserError, match=rf"a\.jsonl:{stop + 1}: not a line of JSON"):
        make(tokenizer, tmp_path / "c", path)
    assert not (tmp_path / "c.idx").exists()
    whole = make(tokenizer, tmp_path / "whole", KINDS["a.jsonl"](path) and path)
    assert texts_of(make(tokenizer, tmp_path / "c", path)) == texts_of(whole), "other inputs: nothing is taken over"
    for left, right in zip(corpus_files(tmp_path / "c"), corpus_files(tmp_path / "whole"), strict=True):
        assert left.read_bytes() == right.read_bytes()
    assert not (tmp_path / "c.partial").exists()


def test_resuming_at_every_piece_gives_the_same_bytes(tokenizer, tmp_path, monkeypatch):
    from mindllm.data.preprocess import build as build_module

    monkeypatch.setattr(resume_module, "SAVE_BYTES", 200)
    (tmp_path / "a.jsonl").write_bytes(jsonl())
    make(tokenizer, tmp_path / "whole", tmp_path / "a.jsonl")
    encode = build_module.encode_pieces

    def interrupted(pieces, tokenizer, workers):
        for number, encoded in enumerate(encode(pieces, tokenizer, workers)):
            if number == 12:
                raise KeyboardInterrupt
            yield encoded

    monkeypatch.setattr(build_module, "encode_pieces", interrupted)
    interruptions = 0
    while not (tmp_path / "c.idx").exists():
        try:
            make(tokenizer, tmp_path / "c", tmp_path / "a.jsonl")
        except KeyboardInterrupt:
            interruptions += 1
    assert 4 <= interruptions <= 8
    for left, right in zip(corpus_files(tmp_path / "c"), corpus_files(tmp_path / "whole"), strict=True):
        assert left.read_bytes() == right.read_bytes(), left


@pytest.mark.parametrize(
    ("content", "records"),
    [
        ('{"data": [{"a": 1}, {"a": 2}]}', [{"a": 1}, {"a": 2}]),
        ('{\n "version": "v1",\n "rows": [\n  {"a": 1}\n ]\n}', [{"a": 1}]),
        ('\ufeff{"train": [{"a": 1}]}', [{"a": 1}]),
        ('{"messages": [{"role": "user"}]}', [{"messages": [{"role": "user"}]}]),
        ('{"a": 1, "data": "x"}', [{"a": 1, "data": "x"}]),
        ('{"a": 1}\n{"a": 2}\n', [{"a": 1}, {"a": 2}]),
        ('{"data": [{"a": 1}]}\n{"data": [{"a": 2}]}\n', [{"data": [{"a": 1}]}, {"data": [{"a": 2}]}]),
    ],
)
def test_a_file_that_is_one_object_has_its_records_under_a_key(tmp_path, content, records):
    """One record a line stays what it was, whatever its keys are called."""
    path = tmp_path / "a.json"
    path.write_text(content, encoding="utf-8")
    assert list(read_records(path)) == records
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(path.read_bytes()))
    assert list(read_records(tmp_path / "a.json.gz")) == records


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.jsonl", b'{"txt": "x"}\n', r"record 1: has no key 'text'; did you mean 'txt'"),
        ("a.jsonl", b'{"text": 5}\n', "record 1: holds 5 where a text should be"),
        ("a.jsonl", b"[1]\n", r"a\.jsonl:1: a record is a JSON object"),
        ("a.jsonl", b'{"text": "caf\xe9"}\n', r"a\.jsonl:1: not a line of JSON"),
        ("a.json", b"[1, 2]", "record 1: a record is a JSON object, not 1"),
        ("a.json", b"[{}, ", "not JSON"),
        (
            "a.json",
            b'{"train": [{}], "test": [{}]}',
            "holds records under train, test; write each list to a separate file",
        ),
        ("a.csv", b"text,b\nx\n", r"a\.csv:2: the header names 2 columns"),
        ("a.jsonl.gz", gzip.compress(jsonl())[:-20], r"a\.jsonl\.gz: damaged"),
        ("a.jsonl.xz", b"nothing", r"a\.jsonl\.xz: damaged"),
        ("a.jsonl.bz2", b"nothing", r"a\.jsonl\.bz2: damaged"),
        ("a.jsonl.zst", b"nothing", r"a\.jsonl\.zst: damaged"),
        ("a.parquet", b"nothing", r"a\.parquet: damaged"),
        ("a.txt.gz", b"nothing", r"a\.txt\.gz: damaged"),
        ("a.jsonl", b'{"text": ""}\n', "files are empty"),
    ],
)
def test_bad_files_are_named_and_leave_nothing(tokenizer, tmp_path, name, content, says):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=says):
        make(tokenizer, tmp_path / "c", tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_two_processes_do_not_make_the_same_corpus(tokenizer, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(jsonl())
    options = {"append_eod": True, "source_fingerprint": "x"}
    with resume_module.ResumableWriter(tmp_path / "c", tokenizer, **options) as first:
        with pytest.raises(UserError, match="another process"):
            make(tokenizer, tmp_path / "c", tmp_path / "a.jsonl")
        first.append([1])
        first.end_text(1)
    assert len(Corpus(tmp_path / "c").dataset) == 1


def test_a_corpus_of_megatron_s_own_tool_is_read(tmp_path):
    """The bytes of its format written out by hand: two documents, the first of two sequences, 16-bit tokens."""
    number = {"u2": "<u2", "i4": "<i4", "i8": "<i8"}
    tokens = [[5, 6, 7], [8], [300, 65499]]
    (tmp_path / "m.bin").write_bytes(b"".join(np.array(part, number["u2"]).tobytes() for part in tokens))
    (tmp_path / "m.idx").write_bytes(
        b"MMIDIDX\x00\x00"
        + (1).to_bytes(8, "little")  # version
        + b"\x08"  # unsigned 16-bit
        + (3).to_bytes(8, "little")  # sequences
        + (3).to_bytes(8, "little")  # boundaries of documents
        + np.array([3, 1, 2], number["i4"]).tobytes()  # lengths
        + np.array([0, 6, 8], number["i8"]).tobytes()  # where they begin, in bytes
        + np.array([0, 2, 3], number["i8"]).tobytes()  # the first sequence of each document
    )
    found = IndexedDataset(tmp_path / "m")
    assert [document.tolist() for document in found] == [[5, 6, 7, 8], [300, 65499]]
    assert Corpus(tmp_path / "m").meta is None
