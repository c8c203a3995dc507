"""The indexed format: bytes as Megatron writes them, round trips, refusal of damaged files, nothing half written."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindllm.data.indexed import IndexedDataset, IndexedWriter, bin_path, index_path, smallest_dtype
from mindllm.errors import UserError

# Three documents [1, 2], [], [0x0304, 5, 6] in uint16, written by hand from Megatron's format description.
HAND_BIN = bytes.fromhex("0100 0200 0403 0500 0600")
HAND_IDX = bytes.fromhex(
    "4d4d494449445800 00"  # MMIDIDX\0\0
    "0100000000000000"  # version 1
    "08"  # uint16
    "0300000000000000"  # sequences
    "0400000000000000"  # document indices
    "02000000 00000000 03000000"  # lengths
    "0000000000000000 0400000000000000 0400000000000000"  # pointers in bytes
    "0000000000000000 0100000000000000 0200000000000000 0300000000000000"  # documents
)

documents_of = st.lists(st.lists(st.integers(0, 60000), max_size=20), max_size=8)


def write(prefix, documents, dtype=np.uint16):
    with IndexedWriter(prefix, dtype) as writer:
        for document in documents:
            writer.append(np.array(document, dtype=np.int64))
            writer.end_document()
    return IndexedDataset(prefix)


def test_bytes_are_those_of_the_format(tmp_path):
    write(tmp_path / "a", [[1, 2], [], [0x0304, 5, 6]])
    assert bin_path(tmp_path / "a").read_bytes() == HAND_BIN
    assert index_path(tmp_path / "a").read_bytes() == HAND_IDX


@pytest.mark.parametrize(("code", "dtype"), list(enumerate(["u1", "i1", "i2", "i4", "i8"], start=1)))
def test_every_integer_type_is_read_and_written(tmp_path, code, dtype):
    write(tmp_path / "a", [[3, 4], [5]], np.dtype(dtype))
    assert index_path(tmp_path / "a").read_bytes()[17] == code
    assert IndexedDataset(tmp_path / "a")[0].tolist() == [3, 4]


def test_documents_of_several_sequences_are_read(tmp_path):
    """Megatron's --split-sentences makes one sequence per sentence: here documents [10, 11, 12] and [13]."""
    index = bytearray(HAND_IDX[:34])
    index[17] = 4
    index[18:34] = np.array([3, 3], "<i8").tobytes()
    index += (
        np.array([2, 1, 1], "<i4").tobytes()
        + np.array([0, 8, 12], "<i8").tobytes()
        + np.array([0, 2, 3], "<i8").tobytes()
    )
    index_path(tmp_path / "m").write_bytes(index)
    bin_path(tmp_path / "m").write_bytes(np.array([10, 11, 12, 13], "<i4").tobytes())
    dataset = IndexedDataset(tmp_path / "m")
    assert [document.tolist() for document in dataset] == [[10, 11, 12], [13]]


@given(documents=documents_of, dtype=st.sampled_from([np.uint16, np.int32, np.int64]))
def test_round_trip(tmp_path_factory, documents, dtype):
    dataset = write(tmp_path_factory.mktemp("round") / "a", documents, dtype)
    assert dataset.dtype == dtype
    assert [document.tolist() for document in dataset] == documents
    assert dataset.token_count == sum(map(len, documents))


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65499, np.uint16), (65500, np.int32)])
def test_dtype_by_vocabulary(vocab_size, dtype):
    assert smallest_dtype(vocab_size) == dtype


def test_token_that_does_not_fit_is_refused_and_nothing_stays(tmp_path):
    with pytest.raises(ValueError, match="70000"):
        write(tmp_path / "a", [[70000]])
    assert list(tmp_path.iterdir()) == []


def test_interrupted_rewrite_leaves_the_old_files(tmp_path):
    write(tmp_path / "a", [[1, 2]])

    def documents():
        yield [9]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "a", documents())
    assert IndexedDataset(tmp_path / "a")[0].tolist() == [1, 2]
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("fails", [".bin", ".idx"])
def test_failed_rename_leaves_no_index_without_its_tokens(tmp_path, monkeypatch, fails):
    write(tmp_path / "a", [[1, 2]])
    rename = Path.replace

    def failing(source, target):
        if str(target).endswith(fails):
            raise OSError("disk is gone")
        rename(source, target)

    monkeypatch.setattr(Path, "replace", failing)
    with pytest.raises(OSError, match="disk is gone"):
        write(tmp_path / "a", [[7, 8, 9]])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("index", "tokens", "says"),
    [
        (HAND_IDX[:-1], HAND_BIN, "truncated"),
        (HAND_IDX[:20], HAND_BIN, "MMIDIDX"),
        (b"", HAND_BIN, "MMIDIDX"),
        (b"PK\x03\x04" + bytes(100), HAND_BIN, "MMIDIDX"),
        (HAND_IDX[:9] + b"\x02" + HAND_IDX[10:], HAND_BIN, "version 2"),
        (HAND_IDX[:17] + b"\x63" + HAND_IDX[18:], HAND_BIN, "dtype code 99"),
        (HAND_IDX[:17] + b"\x07" + HAND_IDX[18:], HAND_BIN, "not tokens"),
        (HAND_IDX[:34] + b"\x01" + HAND_IDX[35:], HAND_BIN, "without gaps"),
        (HAND_IDX[:-8] + b"\x02" + HAND_IDX[-7:], HAND_BIN, "document indices"),
        (HAND_IDX, HAND_BIN[:-1], "truncated"),
        (HAND_IDX, HAND_BIN + b"\x00\x00", "another index"),
    ],
)
def test_damaged_files_are_refused_by_name(tmp_path, index, tokens, says):
    index_path(tmp_path / "x").write_bytes(index)
    bin_path(tmp_path / "x").write_bytes(tokens)
    with pytest.raises(UserError, match=says) as error:
        IndexedDataset(tmp_path / "x")
    assert str(tmp_path / "x") in str(error.value)


def test_missing_files_and_a_prefix_with_ending(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        IndexedDataset(tmp_path / "none")
    write(tmp_path / "a", [[1]])
    with pytest.raises(UserError, match="without its ending"):
        IndexedDataset(tmp_path / "a.bin")
