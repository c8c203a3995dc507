"""Hugging Face directories: bit-equal there and back, in every type; what is wrong with one is named; none is half written."""

import errno
import json
import os
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from mindllm.config import ModelConfig, read_model_config
from mindllm.errors import RunFailed, UserError
from mindllm.families.llama import WEIGHTS as HUGGING_FACE
from mindllm.train.checkpoint.tensors import numpy_dtype
from mindllm.weight_files import merged_pretrained, read_hugging_face, write_weights
from mindllm.weight_files.hugging_face import read_tensor_directory

MODEL = ModelConfig(
    vocab_size=31, hidden_size=8, num_layers=2, num_heads=2, n_kv_heads=1, intermediate_size=12, seq_length=16
)
QUERY = "model.layers.1.self_attn.q_proj.weight"


def random_weights(model=MODEL, seed=0):
    random = np.random.default_rng(seed)
    return {
        name: random.normal(size=shape).astype(np.float32) for name, shape in model.architecture.weight_shapes().items()
    }


@pytest.fixture
def exported(tmp_path):
    """A directory of one file."""
    return write_weights(tmp_path / "hf", MODEL, random_weights())


def rewrite(directory, change):
    """Applies ``change`` to the dictionary of tensors of ``model.safetensors``."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("max_shard_bytes", [5_000_000, 900, 1])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_there_and_back_is_bit_equal(tmp_path, dtype, max_shard_bytes, tied):
    model = MODEL.model_copy(update={"tie_word_embeddings": tied})
    rounded = {name: array.astype(numpy_dtype(dtype)) for name, array in random_weights(model).items()}
    weights = {name: array.astype(np.float32) for name, array in rounded.items()}
    first = write_weights(tmp_path / "1", model, weights, dtype=dtype, max_shard_bytes=max_shard_bytes)
    read = read_hugging_face(first, read_model_config(first))
    assert {name: np.asarray(item).tobytes() for name, item in read.items()} == {
        name: array.tobytes() for name, array in weights.items()
    }
    second = write_weights(tmp_path / "2", model, read, dtype=dtype, max_shard_bytes=max_shard_bytes)
    files = sorted(path.name for path in first.iterdir())
    assert sorted(path.name for path in second.iterdir()) == files
    assert all((first / name).read_bytes() == (second / name).read_bytes() for name in files)


def test_shards_are_of_the_size_asked_for_and_listed(tmp_path):
    directory = write_weights(tmp_path / "hf", MODEL, random_weights(), max_shard_bytes=2000)
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    shards = sorted(directory.glob("*.safetensors"))
    assert len(shards) > 2
    assert shards[0].name == f"model-00001-of-{len(shards):05d}.safetensors"
    held = {path.name: load_file(path) for path in shards}
    assert all(sum(item.nbytes for item in tensors.values()) <= 2000 for tensors in held.values())
    assert index["weight_map"] == {tensor: name for name, tensors in held.items() for tensor in tensors}
    assert index["metadata"]["total_size"] == 4 * MODEL.parameter_count()


def test_every_difference_is_named_as_the_files_name_it(exported):
    def change(tensors):
        del tensors["model.norm.weight"], tensors["lm_head.weight"]
        tensors[QUERY] = tensors[QUERY][:4].copy()
        tensors["model.layers.0.mlp.up_proj.bias"] = np.zeros(12, np.float32)
        tensors["model.layers.0.self_attn.k_proj.weight"] = np.zeros((4, 8), np.int8)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(2, np.float32)  # as old files have it

    rewrite(exported, change)
    with pytest.raises(UserError) as error:
        read_hugging_face(exported, MODEL)
    message = str(error.value)
    assert "missing (2): model.norm.weight float32[8], lm_head.weight float32[31, 8]" in message
    assert "surplus (1): model.layers.0.mlp.up_proj.bias float32[12]" in message
    assert f"{QUERY} float32[4, 8] instead of float32[8, 8]" in message
    assert "model.layers.0.self_attn.k_proj.weight int8[4, 8] instead of float32[4, 8]" in message
    assert "inv_freq" not in message


def test_a_tied_model_may_hold_its_head_again_if_it_is_the_same(exported):
    tied = MODEL.model_copy(update={"tie_word_embeddings": True})
    with pytest.raises(UserError, match=r"surplus \(1\): lm_head.weight"):
        read_hugging_face(exported, tied)
    rewrite(exported, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"]}))
    assert "lm_head.weight" not in read_hugging_face(exported, tied)


def test_pickled_weights_are_those_of_the_safetensors(exported):
    tensors = {name: torch.from_numpy(array) for name, array in load_file(exported / "model.safetensors").items()}
    (exported / "model.safetensors").unlink()
    torch.save(tensors, exported / "pytorch_model.bin")
    for name, array in random_weights().items():
        np.testing.assert_array_equal(read_hugging_face(exported, MODEL)[name], array)


def test_python_code_is_named_and_not_run(exported, caplog):
    (exported / "modeling_llama.py").write_text("raise SystemExit")
    run = SimpleNamespace(load_checkpoint=str(exported), load_adapter="", model=SimpleNamespace(config=MODEL))
    with caplog.at_level("INFO"):
        merged_pretrained(run)
    assert f"{exported} has Python code, which is not run: modeling_llama.py" in caplog.text


def test_no_weights_at_all(exported):
    (exported / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"has no model.safetensors and no model.safetensors.index.json"):
        read_hugging_face(exported, MODEL)
    (exported / "part-1.bin").write_bytes(b"")
    with pytest.raises(UserError, match=r"; it has part-1.bin without an index$"):
        read_hugging_face(exported, MODEL)


def test_a_shard_that_is_missing(tmp_path):
    directory = write_weights(tmp_path / "hf", MODEL, random_weights(), max_shard_bytes=2000)
    (directory / "model-00002-of-00004.safetensors").unlink()
    with pytest.raises(UserError, match=r"missing model-00002-of-00004.safetensors, listed in .*index.json"):
        read_hugging_face(directory, MODEL)


@pytest.mark.parametrize("places", [{"a": "../outside.safetensors"}, {"a": 3}, {}, [], None])
def test_an_index_that_leads_elsewhere(exported, places):
    (exported / "model.safetensors").unlink()
    (exported / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    with pytest.raises(UserError, match="weight_map must give the file in this directory of every tensor"):
        read_hugging_face(exported, MODEL)


def test_a_tensor_in_two_files(tmp_path):
    directory = write_weights(tmp_path / "hf", MODEL, random_weights(), max_shard_bytes=2000)
    first, second, *_ = sorted(directory.glob("*.safetensors"))
    save_file({**load_file(second), **load_file(first)}, second)
    with pytest.raises(UserError, match=r"is also in model-00001-of-00004.safetensors"):
        read_hugging_face(directory, MODEL)


@pytest.mark.parametrize("keep", [0, 7, 8, 100, -1])
def test_a_truncated_file(exported, keep):
    path = exported / "model.safetensors"
    os.truncate(path, keep % path.stat().st_size)
    with pytest.raises(UserError, match=r"model.safetensors: not a safetensors file, or incomplete"):
        read_hugging_face(exported, MODEL)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [-2], "data_offsets": [8, 0]},
        {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]},
        {"dtype": "F32", "shape": [2], "data_offsets": [1000, 1008]},
        {"dtype": "F32", "shape": 2},
        3,
    ],
)
def test_a_header_that_describes_no_tensor(tmp_path, entry):
    header = json.dumps({"a.weight": entry}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(UserError, match=r"a\.weight"):
        read_tensor_directory(tmp_path)


def test_a_directory_that_is_there_is_not_touched(exported):
    before = {path.name: path.read_bytes() for path in exported.iterdir()}
    with pytest.raises(UserError, match="exists already"):
        write_weights(exported, MODEL, random_weights(seed=1))
    assert {path.name: path.read_bytes() for path in exported.iterdir()} == before


def test_values_that_the_type_cannot_hold_are_refused(tmp_path):
    weights = random_weights()
    weights["model.layers.1.attention.wq.weight"][3, 2] = 70000
    with pytest.raises(UserError, match=r"self_attn.q_proj.weight has values too large for float16"):
        write_weights(tmp_path / "hf", MODEL, weights, dtype="float16")
    assert not list(tmp_path.iterdir())
    write_weights(tmp_path / "hf", MODEL, weights, dtype="bfloat16")


def test_a_bias_that_a_llama_does_not_have(tmp_path):
    model = MODEL.model_copy(update={"attn_proj_has_bias": True})
    with pytest.raises(UserError, match="no family has this combination"):
        write_weights(tmp_path / "hf", model, random_weights(model))


@pytest.mark.parametrize("call", range(5))
def test_a_disk_that_is_full_leaves_nothing(tmp_path, monkeypatch, call):
    calls = iter(range(100))

    def fsync(descriptor):
        if next(calls) == call:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(RunFailed, match=r"was not written: No space left on device. Nothing of it is left"):
        write_weights(tmp_path / "hf", MODEL, random_weights(), max_shard_bytes=2000)
    assert not list(tmp_path.iterdir())


def test_names_of_the_two_conventions_are_not_mixed_up(exported):
    tensors = read_tensor_directory(exported)
    for name, array in random_weights().items():
        np.testing.assert_array_equal(tensors[HUGGING_FACE.theirs(name)], array)


def test_one_file_goes_before_older_shards_as_in_transformers(tmp_path, caplog):
    """The index and its shards are those of an earlier model in the same directory."""
    transformers = pytest.importorskip("transformers")
    directory = tmp_path / "model"
    new, old = random_weights(MODEL, seed=1), random_weights(MODEL, seed=2)
    write_weights(directory, MODEL, new)
    write_weights(tmp_path / "old", MODEL, old, max_shard_bytes=900)
    for path in [*(tmp_path / "old").glob("model-*"), tmp_path / "old/model.safetensors.index.json"]:
        shutil.copy(path, directory)
    found = read_hugging_face(directory, MODEL)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    name = "model.tok_embeddings.embedding_weight"
    np.testing.assert_array_equal(np.asarray(found[name]), new[name])
    np.testing.assert_array_equal(theirs.get_input_embeddings().weight.detach().numpy(), new[name])
    assert "model.safetensors.index.json is ignored" in caplog.text
    (directory / "model.safetensors").unlink()
    np.testing.assert_array_equal(np.asarray(read_hugging_face(directory, MODEL)[name]), old[name])
