"""What is saved comes back bit by bit; the newest few are kept; abandoned runs are set aside; misfits are named."""

import gc
import weakref

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.numpy import load_file, save_file

from mindllm.errors import UserError
from mindllm.train.checkpoint import CheckpointStore, RankTensors, load_checkpoint
from mindllm.train.checkpoint.tensors import CODES, NOT_IN_NUMPY, read_tensors

DTYPES = st.sampled_from(sorted(set(CODES) - set(NOT_IN_NUMPY))).map(np.dtype)
ARRAYS = hnp.arrays(DTYPES, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))
TENSORS = st.dictionaries(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(lambda name: name != "__metadata__"),
    ARRAYS,
    max_size=6,
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
FEW = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def weights(value: float = 0.0) -> dict[str, np.ndarray]:
    return {"embedding.weight": np.full((7, 5), value, np.float32), "norm.weight": np.full(5, value, np.float32)}


def optimizer(value: float = 0.0) -> dict[str, np.ndarray]:
    return {f"adam_{moment}.{name}": array + 1 for moment in "mv" for name, array in weights(value).items()}


def save(store: CheckpointStore, step: int, value: float | None = None):
    value = float(step) if value is None else value
    return store.save(step, {0: RankTensors(weights(value), optimizer(value))}, {"loss_scale": value})


def steps(store: CheckpointStore) -> list[int]:
    return sorted(int(path.name.split("-")[1]) for path in store.directory.iterdir() if "superseded" not in path.name)


def same_bits(found, expected) -> bool:
    return found.keys() == expected.keys() and all(
        found[name].dtype == array.dtype
        and found[name].shape == array.shape
        and found[name].tobytes() == array.tobytes()
        for name, array in expected.items()
    )


@FEW
@given(TENSORS, TENSORS, st.dictionaries(st.text(), JSON, max_size=4))
def test_round_trip_is_bit_equal(tmp_path, model, moments, state):
    store = CheckpointStore(tmp_path)
    loaded = load_checkpoint(store.save(3, {0: RankTensors(model, moments)}, state))
    assert same_bits(loaded.weights, model)
    assert same_bits(loaded.optimizer, moments)
    assert (loaded.step, loaded.state) == (3, state)


@FEW
@given(TENSORS)
def test_files_are_safetensors_for_the_library_too(tmp_path, tensors):
    path = CheckpointStore(tmp_path).save(0, {0: RankTensors(tensors, {})}, {})
    assert same_bits(load_file(path / "model.safetensors"), tensors)
    save_file(tensors, tmp_path / "theirs.safetensors", {"format": "np"})
    assert same_bits(read_tensors(tmp_path / "theirs.safetensors"), tensors)


@pytest.mark.parametrize(
    "array",
    [np.arange(24.0).reshape(4, 6).T, np.arange(24)[::3], np.arange(6, dtype=">f4").reshape(2, 3), np.float32(2.5)],
    ids=["transposed", "strided", "big endian", "scalar"],
)
def test_any_memory_layout_saves_its_values(tmp_path, array):
    loaded = load_checkpoint(CheckpointStore(tmp_path).save(0, {0: RankTensors({"w": array}, {})}, {}))
    np.testing.assert_array_equal(loaded.weights["w"], array)
    assert loaded.weights["w"].shape == array.shape


def test_one_tensor_at_a_time_is_in_memory(tmp_path):
    alive: weakref.WeakSet = weakref.WeakSet()
    most = 0

    class OnDevice:
        shape, dtype = (1000,), np.dtype(np.float32)

        def __array__(self):
            nonlocal most
            array = np.ones(1000, np.float32).view(Tracked)
            alive.add(array)
            most = max(most, len(alive))
            return array

    class Tracked(np.ndarray):
        __hash__ = object.__hash__

    gc.collect()
    path = CheckpointStore(tmp_path).save(1, {0: RankTensors({f"w{i}": OnDevice() for i in range(5)}, {})}, {})
    assert most == 1
    assert sum(array.sum() for array in load_checkpoint(path).weights.values()) == 5000


def test_loaded_arrays_can_be_written_without_changing_the_file(tmp_path):
    path = save(CheckpointStore(tmp_path), 1)
    load_checkpoint(path).weights["norm.weight"][:] = 9
    assert load_checkpoint(path).weights["norm.weight"][0] == 1


@pytest.mark.parametrize("state", [{"rate": float("nan")}, {"pair": (1, 2)}, {"of": {1: 2}}])
def test_state_that_json_would_change_is_refused(tmp_path, state):
    with pytest.raises((TypeError, ValueError)):
        CheckpointStore(tmp_path).save(1, {0: RankTensors({}, {})}, state)
    assert not list(tmp_path.iterdir())


def test_a_dtype_without_a_code_is_refused_by_the_name_of_its_tensor(tmp_path):
    with pytest.raises(TypeError, match=r"tensor odd: .*complex128"):
        CheckpointStore(tmp_path).save(1, {0: RankTensors({"odd": np.zeros(2, complex)}, {})}, {})
    assert not list(tmp_path.iterdir())


def test_the_name_that_the_format_reserves_is_refused(tmp_path):
    with pytest.raises(ValueError, match="__metadata__"):
        CheckpointStore(tmp_path).save(1, {0: RankTensors({"__metadata__": np.zeros(2)}, {})}, {})
    assert not list(tmp_path.iterdir())


def test_the_newest_few_are_kept_in_order_of_steps(tmp_path):
    store = CheckpointStore(tmp_path / "deep" / "er", keep_checkpoint_max=3)
    for step in (5, 9, 10, 100, 101):
        save(store, step)
    assert steps(store) == [10, 100, 101]
    assert store.newest() == store.latest_good() == store.directory / "llm-101"


def test_other_prefixes_are_left_alone(tmp_path):
    save(CheckpointStore(tmp_path, "llm-2"), 7)
    store = CheckpointStore(tmp_path, "llm", keep_checkpoint_max=1)
    save(store, 1)
    save(store, 2)
    assert {path.name for path in tmp_path.iterdir()} == {"llm-2-7", "llm-2"}
    assert store.newest() == tmp_path / "llm-2"


def test_a_second_save_of_a_step_replaces_the_first(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 4, value=1.0)
    path = save(store, 4, value=2.0)
    assert load_checkpoint(path).state == {"loss_scale": 2.0}
    assert [entry.name for entry in tmp_path.iterdir()] == ["llm-4"]


def test_going_back_sets_later_checkpoints_aside_until_new_ones_displace_them(tmp_path):
    store = CheckpointStore(tmp_path, keep_checkpoint_max=3)
    for step in (50, 100, 150):
        save(store, step)
    assert [path.name for path in store.supersede_after(50)] == ["llm-100.superseded-1", "llm-150.superseded-1"]
    assert store.resume(True).step == 50
    assert load_checkpoint(tmp_path / "llm-150.superseded-1").step == 150
    save(store, 60)
    assert {path.name for path in tmp_path.iterdir()} == {"llm-50", "llm-60", "llm-150.superseded-1"}
    store.supersede_after(50)
    assert (tmp_path / "llm-60.superseded-2").is_dir()
    assert store.supersede_after(50) == []


def test_the_one_just_saved_is_never_the_one_deleted(tmp_path):
    store = CheckpointStore(tmp_path, keep_checkpoint_max=2)
    for step in (100, 150, 60):
        save(store, step)
    assert steps(store) == [60, 150]


def test_resume_true_takes_the_newest_and_a_path_takes_that_one(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 1)
    save(store, 2)
    assert store.resume(True).step == 2
    assert store.resume(str(tmp_path / "llm-1")).state == {"loss_scale": 1.0}


def test_resume_without_a_checkpoint_is_an_error(tmp_path):
    save(CheckpointStore(tmp_path, "other"), 3)
    with pytest.raises(UserError, match=r"no checkpoint llm-<step>; it has other-3; start without resume_training"):
        CheckpointStore(tmp_path).resume(True)
    with pytest.raises(UserError, match="no checkpoint"):
        CheckpointStore(tmp_path / "nowhere").resume(True)


def test_weights_alone_load_without_the_optimizer(tmp_path):
    path = save(CheckpointStore(tmp_path), 1)
    (path / "optimizer.safetensors").unlink()
    loaded = load_checkpoint(path, option="--load_checkpoint", with_optimizer=False)
    assert same_bits(loaded.weights, weights(1.0))
    assert loaded.optimizer == {}


def test_a_model_of_hugging_face_is_no_damaged_checkpoint(tmp_path):
    (tmp_path / "merged").mkdir()
    (tmp_path / "merged" / "config.json").write_text("{}")
    (tmp_path / "merged" / "model.safetensors").touch()
    with pytest.raises(
        UserError, match=r"merged: is a Hugging Face model; pass a checkpoint of mindllm, or an adapter"
    ):
        load_checkpoint(tmp_path / "merged", option="ADAPTER")
    (tmp_path / "text.txt").touch()
    with pytest.raises(UserError, match=r"ADAPTER=.*text\.txt is a file; a checkpoint is a directory$"):
        load_checkpoint(tmp_path / "text.txt", option="ADAPTER")


def test_paths_that_are_no_checkpoint_are_explained(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoint")
    path = save(store, 12)
    for wrong in (tmp_path, tmp_path / "checkpoint"):
        with pytest.raises(UserError, match=f"pass one of them: --resume_training={path}"):
            load_checkpoint(wrong)
    with pytest.raises(UserError, match=f"is a file; .* pass --load_checkpoint={path}"):
        load_checkpoint(path / "model.safetensors", option="--load_checkpoint")
    with pytest.raises(UserError, match=r"does not exist; there is llm-12$"):
        load_checkpoint(tmp_path / "checkpoint" / "llm-13")
    for step in (20, 34, 50):
        (tmp_path / "checkpoint" / f"llm-{step}").mkdir()
    with pytest.raises(UserError, match=r"does not exist; there are llm-12, llm-20, llm-34, llm-50$"):
        load_checkpoint(tmp_path / "checkpoint" / "llm-64")
    (tmp_path / "checkpoint" / "llm-60").mkdir()
    with pytest.raises(UserError, match=r"does not exist; there are …, llm-20, llm-34, llm-50, llm-60$"):
        load_checkpoint(tmp_path / "checkpoint" / "llm-64")


def expected(tensors):
    return {name: (array.shape, array.dtype) for name, array in tensors.items()}


def test_tensors_that_fit_pass(tmp_path):
    loaded = load_checkpoint(save(CheckpointStore(tmp_path), 1))
    loaded.require(expected(weights()), expected(optimizer()))
    loaded.require({name: (shape, "float32") for name, (shape, _) in expected(weights()).items()})


def test_tensors_that_do_not_fit_are_named_in_one_error(tmp_path):
    loaded = load_checkpoint(save(CheckpointStore(tmp_path), 1))
    wanted = {
        "embedding.weight": ((5, 7), np.float32),
        "norm.weight": ((5,), np.float16),
        "head.weight": ((7, 5), np.float32),
    }
    moments = expected(optimizer())
    del moments["adam_m.norm.weight"]
    with pytest.raises(UserError) as error:
        loaded.require(wanted, moments)
    message = str(error.value)
    assert "weights, missing (1): head.weight float32[7, 5]" in message
    assert "embedding.weight float32[7, 5] instead of float32[5, 7]" in message
    assert "norm.weight float32[5] instead of float16[5]" in message
    assert "optimizer, surplus (1): adam_m.norm.weight float32[5]" in message


def test_long_lists_of_misfits_are_cut(tmp_path):
    loaded = load_checkpoint(CheckpointStore(tmp_path).save(1, {0: RankTensors({}, {})}, {}))
    with pytest.raises(UserError, match=r"missing \(500\): .* and 490 more"):
        loaded.require({f"layers.{i}.w": ((1,), np.float32) for i in range(500)})
