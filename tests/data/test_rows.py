"""Rows as samples: packing loses and mixes nothing, epochs are permutations, samples depend on their number only."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindllm.data import BatchStream, EvaluationStream, HeldOutRows, MindRecordRows, Packs, RowDataset, pack
from mindllm.data.rows import Row, assemble
from mindllm.errors import UserError

CAPACITY = 24
places_of = st.lists(st.integers(0, CAPACITY), max_size=60).map(lambda values: np.array(values, dtype=np.int32))


@given(places_of, st.integers(0, 2**32))
def test_every_row_is_in_exactly_one_pack_and_fits(places, seed):
    packs = pack(places, CAPACITY, seed)
    assert sorted(row for rows in packs for row in rows) == list(range(len(places)))
    assert all(0 < places[rows].sum() <= CAPACITY or not places[rows].any() for rows in packs)
    assert packs == pack(places, CAPACITY, seed)


@given(places_of)
def test_no_two_packs_could_be_one(places):
    """Best fit leaves at most one pack half empty."""
    sums = sorted(int(places[rows].sum()) for rows in pack(places, CAPACITY, 0) if places[rows].any())
    assert all(first + second > CAPACITY for first, second in pairwise(sums))


def test_a_row_that_does_not_fit_is_an_error():
    with pytest.raises(ValueError, match="25 places"):
        pack(np.array([3, 25]), CAPACITY, 0)


class NumberedRows:
    """Row i has i % 7 + 2 tokens, each 100 i + its place; the odd ones are trained."""

    def __init__(self, count=50):
        self.count = count

    def __len__(self):
        return self.count

    def rows(self, numbers):
        return [self.row(number) for number in numbers]

    @staticmethod
    def row(number):
        tokens = 100 * number + np.arange(number % 7 + 2, dtype=np.int32)
        return Row(tokens, tokens % 2 == 1)


def packed_dataset(count=50, seed=0):
    rows = NumberedRows(count)
    places = np.array([rows.row(number).places for number in range(count)])
    groups = [np.array(group) for group in pack(places, 12, seed)]
    return RowDataset(rows, Packs.of(groups), 12, seed, packed=True)


def segments(sample):
    """The pieces of a packed sample as (inputs, labels, mask, positions), without its padding."""
    starts = np.unique(sample["segment_starts"])
    for start, stop in zip(starts, [*starts[1:], 12], strict=True):
        part = slice(start, stop)
        yield sample["input_ids"][part], sample["labels"][part], sample["loss_mask"][part], sample["position_ids"][part]


@pytest.mark.parametrize("epoch", [0, 1, 5])
def test_an_epoch_of_packs_holds_every_row_once_and_whole(epoch):
    dataset = packed_dataset()
    count = dataset.samples_per_epoch
    seen = []
    for index in range(epoch * count, (epoch + 1) * count):
        for inputs, labels, mask, position in segments(dataset.sample(index)):
            if not mask.any() and not labels.any():
                continue  # padding
            number = int(inputs[0]) // 100
            row = NumberedRows.row(number)
            assert np.array_equal(inputs, row.tokens[:-1])
            assert np.array_equal(labels, row.tokens[1:])
            assert np.array_equal(mask, row.trained[1:])
            assert np.array_equal(position, np.arange(len(inputs)))
            seen.append(number)
    assert sorted(seen) == list(range(50))


def test_padding_sees_no_row():
    sample = assemble([NumberedRows.row(3)], 12, packed=True)
    assert sample["segment_starts"].tolist() == [0] * 4 + [4] * 8


@given(step=st.integers(0, 200), readers=st.sampled_from([1, 2, 4]))
def test_batches_do_not_depend_on_history_or_readers(step, readers):
    whole = BatchStream(packed_dataset(), 4).batch(step)
    parts = [BatchStream(packed_dataset(), 4, rank=rank, rank_count=readers).batch(step) for rank in range(readers)]
    for name, array in whole.items():
        assert np.array_equal(array, np.concatenate([part[name] for part in parts]))


def test_unpacked_epochs_are_permutations_and_differ():
    dataset = RowDataset(NumberedRows(), Packs.single(np.arange(50)), 12, seed=1)
    orders = [[int(dataset.rows_of(index)[0]) for index in range(first, first + 50)] for first in (0, 50)]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(50))
    assert orders[0] != orders[1]
    assert set(dataset.sample(0)) == {"input_ids", "labels", "loss_mask"}


def test_held_out_rows_come_once_in_order_and_then_padding():
    stream = EvaluationStream(HeldOutRows(NumberedRows(), range(40, 45), 12), 2)
    batches = list(stream)
    assert [int(row[0]) // 100 for batch in batches for row in batch["input_ids"]] == [40, 41, 42, 43, 44, 0]
    assert not batches[-1]["loss_mask"][1].any()


@pytest.fixture(scope="module")
def mind_record(tmp_path_factory):
    from mindspore.mindrecord import FileWriter

    directory = tmp_path_factory.mktemp("mind_record")

    def write(name, rows, **columns):
        schema = {column: {"type": kind, "shape": [-1]} for column, kind in columns.items()}
        writer = FileWriter(str(directory / name), shard_num=1)
        writer.add_schema(schema, "rows of tokens")
        writer.write_raw_data(rows)
        writer.commit()
        return str(directory / name)

    return write


def test_mind_record_rows_by_number(mind_record):
    tokens = [np.arange(9, dtype=np.int32) + 10 * number for number in range(30)]
    first = mind_record("a.mindrecord", [{"input_ids": row} for row in tokens[:20]], input_ids="int32")
    second = mind_record("b.mindrecord", [{"input_ids": row} for row in tokens[20:]], input_ids="int32")
    rows = MindRecordRows([first, second], 8)
    assert len(rows) == 30
    order = [25, 3, 0, 29, 3]
    assert [row.tokens.tolist() for row in rows.rows(order)] == [tokens[number].tolist() for number in order]
    assert all(row.trained.all() for row in rows.rows([1]))


@pytest.mark.parametrize("column", ["labels", "target_ids"])
def test_mind_record_labels_say_where_the_loss_is(mind_record, column):
    labels = np.array([-100, -100, 2, 3, -100], dtype=np.int64)
    ids = np.arange(5, dtype=np.int64)
    rows = MindRecordRows(
        [mind_record(f"c_{column}", [{"input_ids": ids, column: labels}], **{"input_ids": "int64", column: "int64"})], 4
    )
    sample = RowDataset(rows, Packs.single(np.arange(1)), 4, 0).sample(0)
    assert sample["labels"].tolist() == [1, 2, 3, 4]
    assert sample["loss_mask"].tolist() == [0.0, 1.0, 1.0, 0.0]
    assert sample["input_ids"].dtype == np.int32


SHIFTED = {"input_ids": "int32", "labels": "int32", "loss_mask": "float32", "position_ids": "int32"}


def shifted(name, mind_record, **changes):
    tokens = np.arange(10, 19, dtype=np.int32)
    row = {"input_ids": tokens[:-1], "labels": tokens[1:], "loss_mask": np.ones(8, np.float32)}
    row |= {"position_ids": np.arange(8, dtype=np.int32)}
    row |= {key: np.array(value, row[key].dtype) for key, value in changes.items()}
    return MindRecordRows([mind_record(name, [row], **SHIFTED)], 8, shifted=True)


def test_labels_that_stand_one_place_ahead_are_the_same_sample(mind_record):
    plain = mind_record("whole", [{"input_ids": np.arange(10, 19, dtype=np.int32)}], input_ids="int32")
    of_one, of_other = (
        RowDataset(rows, Packs.single(np.arange(1)), 8, 0).sample(0)
        for rows in (MindRecordRows([plain], 8), shifted("shifted", mind_record))
    )
    for column in ("input_ids", "labels", "loss_mask"):
        np.testing.assert_array_equal(of_one[column], of_other[column])


def test_losses_that_do_not_count_are_of_the_label_they_stand_at(mind_record):
    labels, mask = [-100, 12, 0, 14, 15, 16, 17, -100], [1, 1, 0, 1, 1, 1, 1, 1]
    rows = shifted("masked", mind_record, labels=labels, loss_mask=mask)
    sample = RowDataset(rows, Packs.single(np.arange(1)), 8, 0).sample(0)
    assert sample["input_ids"].tolist() == [*range(10, 18)]
    assert sample["loss_mask"].tolist() == [0, 1, 0, 1, 1, 1, 1, 0]
    counted = sample["loss_mask"] == 1
    assert sample["labels"][counted].tolist() == [12, 14, 15, 16, 17]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"labels": [11, 12, 99, 14, 15, 16, 17, 18]}, "label 2 is 99, and the token after input 2 is 13"),
        ({"labels": range(10, 18)}, "label 0 is 10, and the token after input 0 is 11"),
        ({"loss_mask": [0.5] * 8}, "loss_mask holds weights"),
        ({"position_ids": [0, 1, 2, 0, 1, 2, 3, 4]}, "position_ids are not 0, 1, 2"),
        ({"labels": range(9)}, "row 0 has 9 values in labels, not seq_length = 8"),
    ],
)
def test_a_shifted_row_that_says_something_else_is_refused(changes, said, mind_record):
    with pytest.raises(UserError, match=said):
        shifted(f"bad_{abs(hash(said))}", mind_record, **changes).rows([0])


def test_shifted_rows_need_labels(mind_record):
    path = mind_record("alone", [{"input_ids": np.arange(8, dtype=np.int32)}], input_ids="int32")
    with pytest.raises(UserError, match="no column labels, which rows with shifted_labels need; found: input_ids"):
        MindRecordRows([path], 8, shifted=True)


def test_mind_record_mistakes_are_named(mind_record, tmp_path):
    path = mind_record("d.mindrecord", [{"input_ids": np.arange(9, dtype=np.int32)}], input_ids="int32")
    with pytest.raises(UserError, match=r"row 0 has 9 tokens, not seq_length \+ 1 = 17; set .*seq_length to 8"):
        MindRecordRows([path], 16).rows([0])
    other = mind_record("e.mindrecord", [{"pixels": np.arange(9, dtype=np.int32)}], pixels="int32")
    with pytest.raises(UserError, match="no column input_ids; found: pixels"):
        MindRecordRows([other], 8)
    with pytest.raises(UserError, match=r"no\.mindrecord: no such file"):
        MindRecordRows([str(tmp_path / "no.mindrecord")], 8)
    for name in ("x.mindrecord", "x.mindrecord.db"):
        Path(tmp_path / name).write_bytes(b"nothing")
    with pytest.raises(UserError, match="cannot be read as MindRecord"):
        MindRecordRows([str(tmp_path / "x.mindrecord")], 8)
