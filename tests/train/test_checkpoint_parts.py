"""Tensors saved in parts: whole again, read as other parts, written once, refused when something is missing."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindllm.errors import UserError
from mindllm.train.checkpoint import CheckpointStore, Part, RankTensors, load_checkpoint
from mindllm.train.checkpoint.parts import read_parts, write_parts
from mindllm.train.checkpoint.tensors import Converted, HashingWriter, read_slices, stored_tensors


def rows(array: np.ndarray, count: int, axis: int) -> list[dict[str, Part]]:
    """The array cut along an axis, one part per rank."""
    ranks = []
    for index in range(count):
        length = array.shape[axis] // count
        slices = [slice(0, size) for size in array.shape]
        slices[axis] = slice(index * length, (index + 1) * length)
        ranks.append({"weight": Part(array.shape, tuple(slices), array[tuple(slices)])})
    return ranks


def held(weights: list[dict[str, Part]], optimizer: list[dict[str, Part]] | None = None) -> dict[int, RankTensors]:
    """What ranks keep, by rank."""
    moments = optimizer or [{} for _ in weights]
    return {rank: RankTensors(*pair) for rank, pair in enumerate(zip(weights, moments, strict=True))}


@given(st.sampled_from([1, 2, 4]), st.sampled_from([0, 1]), st.integers(0, 7), st.integers(1, 8), st.integers(0, 3))
def test_any_part_of_any_cut(tmp_path_factory, count, axis, begin, length, column):
    array = np.arange(8 * 4, dtype=np.float32).reshape(8, 4)
    store = CheckpointStore(tmp_path_factory.mktemp("parts"), keep_checkpoint_max=1)
    path = store.save(3, held(rows(array, count, axis), rows(array * 2, count, axis)), {})
    checkpoint = load_checkpoint(path)
    wanted = (slice(begin, min(8, begin + length)), slice(column, 4))
    shape = [cut.stop - cut.start for cut in wanted]
    assert np.array_equal(checkpoint.slice("weight", [begin, column], shape), array[wanted])
    assert np.array_equal(np.asarray(checkpoint.optimizer["weight"]), array * 2)


def test_copies_are_written_once(tmp_path):
    array = np.ones((4, 4), np.float32)
    copies = [rows(array, 1, 0)[0]] * 3
    path = CheckpointStore(tmp_path, keep_checkpoint_max=1).save(1, held(copies, copies), {})
    assert [file.name for file in path.glob("model-*")] == ["model-00000-of-00003.safetensors"]


def test_a_missing_part_is_named(tmp_path):
    first, _ = rows(np.ones((4, 4), np.float32), 2, 0)
    with open(tmp_path / "one.safetensors", "wb") as file:
        write_parts(first, HashingWriter(file))
    with pytest.raises(ValueError, match="the parts of tensor weight have 8 of its 16 values"):
        read_parts([tmp_path / "one.safetensors"])


def test_parts_that_overlap_are_named(tmp_path):
    array = np.ones((4, 4), np.float32)
    shifted = [{"weight": Part(array.shape, (slice(begin, begin + 2), slice(0, 4)), array[:2])} for begin in (0, 1)]
    path = CheckpointStore(tmp_path).save(1, held(shifted), {})
    with pytest.raises(UserError, match="the parts of tensor weight overlap"):
        load_checkpoint(path)


def test_a_checkpoint_that_lacks_a_rank_is_refused_by_name(tmp_path):
    first, _ = rows(np.ones((4, 4), np.float32), 2, 0)
    path = CheckpointStore(tmp_path).save(1, {0: RankTensors(first, {}), 1: RankTensors({}, {})}, {})
    with pytest.raises(UserError, match=r"llm-1.*the parts of tensor weight have 8 of its 16 values"):
        load_checkpoint(path)


def test_a_block_of_a_file_larger_than_memory_is_read_alone(tmp_path):
    """4 TB of a sparse file: what is not asked for is not touched."""
    shape, path = (1 << 27, 8192), tmp_path / "model.safetensors"
    size = 4 * shape[0] * shape[1]
    header = json.dumps({"w": {"dtype": "F32", "shape": list(shape), "data_offsets": [0, size]}}).encode()
    with open(path, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        try:
            file.truncate(8 + len(header) + size)
        except OSError:
            pytest.skip("this file system has no sparse files of that size")
        file.seek(8 + len(header) + 4 * (shape[1] * 77_000_000 + 5))
        file.write(np.float32(3.5).tobytes())
    stored = stored_tensors(path)["w"]
    for source in (stored, Converted("w", stored, np.dtype(np.float16))):
        block = read_slices(source, (slice(77_000_000, 77_000_002), slice(4, 7)))
        assert block.dtype == source.dtype
        assert block.tolist() == [[0.0, 3.5, 0.0], [0.0, 0.0, 0.0]]


def test_blocks_that_are_not_there_are_refused(tmp_path):
    path = CheckpointStore(tmp_path).save(1, {0: RankTensors({"weight": np.ones((4, 4))}, {})}, {})
    checkpoint = load_checkpoint(path)
    assert checkpoint.slice("weight", [3, 0], [1, 4]).tolist() == [[1.0] * 4]
    for offsets, shape in (([3, 0], [2, 4]), ([0], [4]), ([-1, 0], [1, 4])):
        with pytest.raises(UserError, match=r"tensor weight of shape \[4, 4\] has no block"):
            checkpoint.slice("weight", offsets, shape)
    with pytest.raises(UserError, match="has no tensor weigth; did you mean 'weight'"):
        checkpoint.slice("weigth", [0, 0], [1, 1])
