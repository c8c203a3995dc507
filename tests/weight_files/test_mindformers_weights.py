"""Checkpoints of MindFormers: legacy and mcore names, files, shards, ranks that hold parts; the values are those saved."""

import json
import math
from types import SimpleNamespace

import mindspore
import numpy as np
import pytest
from mindspore.parallel import _tensor as mindspore_layouts
from mindspore.train.node_strategy_pb2 import ParallelStrategyMap
from safetensors.numpy import save_file

from mindllm.config import ModelConfig
from mindllm.errors import UserError
from mindllm.weight_files import merged_pretrained
from mindllm.weight_files.mindformers import Layout, is_mindformers, mindformers_tensors, read_mindformers

MODEL = ModelConfig(
    vocab_size=32,
    hidden_size=16,
    num_layers=2,
    num_heads=4,
    n_kv_heads=2,
    intermediate_size=24,
    seq_length=16,
    qkv_has_bias=True,
)
QUERY = "model.layers.1.attention.wq.weight"


def random_weights(model=MODEL):
    random = np.random.default_rng(0)
    return {
        name: random.normal(size=shape).astype(np.float32) for name, shape in model.architecture.weight_shapes().items()
    }


def save_ckpt(path, arrays):
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = [{"name": name, "data": mindspore.Tensor(values)} for name, values in arrays.items()]
    mindspore.save_checkpoint(tensors, str(path))


def mcore(weights):
    """The same weights as an mcore model of MindFormers keeps them."""
    theirs = {
        "embedding.word_embeddings.weight": weights["model.tok_embeddings.embedding_weight"],
        "decoder.final_layernorm.weight": weights["model.norm_out.weight"],
        "output_layer.weight": weights["lm_head.weight"],
    }
    for layer in range(MODEL.num_layers):
        here, there = f"model.layers.{layer}.", f"decoder.layers.{layer}."
        theirs[there + "input_layernorm.weight"] = weights[here + "attention_norm.weight"]
        theirs[there + "pre_mlp_layernorm.weight"] = weights[here + "ffn_norm.weight"]
        theirs[there + "self_attention.linear_proj.weight"] = weights[here + "attention.wo.weight"]
        theirs[there + "mlp.linear_fc2.weight"] = weights[here + "feed_forward.w2.weight"]
        gate, up = (weights[here + f"feed_forward.{name}.weight"] for name in ("w1", "w3"))
        theirs[there + "mlp.linear_fc1.weight"] = np.concatenate([gate, up])
        for kind in ("weight", "bias"):
            query, key, value = (weights[here + f"attention.{name}.{kind}"] for name in ("wq", "wk", "wv"))
            groups = []
            for group in range(2):  # two heads of 4 rows that share a key of 4 rows
                groups += [
                    query[8 * group : 8 * group + 8],
                    key[4 * group : 4 * group + 4],
                    value[4 * group : 4 * group + 4],
                ]
            theirs[there + f"self_attention.linear_qkv.{kind}"] = np.concatenate(groups)
    return theirs


def assert_read(path, weights=None, model=MODEL):
    found = read_mindformers(path, model)
    weights = random_weights(model) if weights is None else weights
    assert set(found) == set(weights)
    for name, values in weights.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)
        assert found[name].shape == values.shape


@pytest.mark.parametrize("names", [dict, mcore], ids=["legacy", "mcore"])
def test_one_file_of_either_format_with_what_training_adds(tmp_path, names):
    theirs = names(random_weights())
    moments = {f"adam_m.{name}": values for name, values in theirs.items()}
    counters = {"global_step": np.asarray([7], np.int32), "epoch_num": np.asarray(3)}
    save_ckpt(tmp_path / "llama.ckpt", {**theirs, **moments, **counters})
    assert is_mindformers(tmp_path / "llama.ckpt")
    assert_read(tmp_path / "llama.ckpt")
    save_file(theirs, tmp_path / "llama.safetensors")
    assert_read(tmp_path / "llama.safetensors")


def test_a_run_starts_from_them(tmp_path):
    save_ckpt(tmp_path / "llama.ckpt", random_weights())
    model = SimpleNamespace(config=MODEL)
    run = SimpleNamespace(load_checkpoint=str(tmp_path / "llama.ckpt"), load_adapter="", model=model)
    np.testing.assert_array_equal(merged_pretrained(run)[1][QUERY], random_weights()[QUERY])


@pytest.mark.parametrize("wrapped", [False, True])
def test_unified_safetensors_with_their_map(tmp_path, wrapped):
    weights = random_weights()
    names = list(weights)
    for number, part in enumerate((names[:9], names[9:])):
        save_file({name: weights[name] for name in part}, tmp_path / f"part{number}.safetensors")
    places = {name: f"part{int(index >= 9)}.safetensors" for index, name in enumerate(names)}
    (tmp_path / "param_name_map.json").write_text(json.dumps({"weight_map": places} if wrapped else places))
    assert is_mindformers(tmp_path)
    assert_read(tmp_path)
    (tmp_path / "part1.safetensors").unlink()
    with pytest.raises(UserError, match=r"missing part1.safetensors, listed in param_name_map.json"):
        read_mindformers(tmp_path, MODEL)


def test_replicas_of_ranks_are_one_model_at_the_newest_step_that_all_have(tmp_path):
    for rank in range(2):
        for step, factor in ((2, 0.5), (10, 1.0)):
            weights = {name: values * np.float32(factor) for name, values in random_weights().items()}
            save_ckpt(tmp_path / f"rank_{rank}" / f"llama_rank_{rank}-1_{step}.ckpt", weights)
    save_ckpt(tmp_path / "rank_0" / "llama_rank_0-1_20.ckpt", random_weights())
    assert is_mindformers(tmp_path)
    assert_read(tmp_path)


def test_pipeline_stages_hold_their_layers(tmp_path):
    weights = random_weights()
    first = {name: values for name, values in weights.items() if "layers.0" in name or "tok" in name}
    for rank, part in enumerate((first, {name: weights[name] for name in weights.keys() - first.keys()})):
        save_ckpt(tmp_path / f"rank_{rank}" / f"llama_rank_{rank}-1_1.ckpt", part)
    assert_read(tmp_path)


# name: (matrix of devices, map of the axes, size of the optimizer's parallelism)
CUTS = {
    "columns": ((2, 2), (0, -1), 0),
    "rows": ((2, 2), (-1, 0), 0),
    "both": ((2, 2), (1, 0), 0),
    "optimizer": ((4, 2), (0, -1), 4),
    "optimizer, some": ((4, 2), (0, -1), 2),
    "optimizer, uncut": ((2, 2), (-1, -1), -1),
    "optimizer, rows": ((4, 2), (-1, 0), 4),
    "optimizer, outer": ((2, 4), (1, -1), 4),
    "optimizer, between": ((2, 2, 2), (0, 2), 2),
}


def parts_by_mindspore(values, devices, axes, optimizer):
    """What MindSpore itself keeps on every rank of a parameter: its own functions for loading make the slices."""
    repeated = [index for index in range(len(devices)) if len(devices) - 1 - index not in axes]
    size = math.prod(devices[index] for index in repeated) if optimizer < 0 else optimizer
    step = math.prod(devices[repeated[-1] + 1 :]) if size else 0
    make = mindspore_layouts._construct_tensor_layout_for_opt_shard
    layout = make(list(devices), list(axes), step, size, values.shape)
    parts = []
    for rank in range(math.prod(devices)):
        part = mindspore_layouts._load_tensor(mindspore.Tensor(values), *layout[:2], layout[2], rank_id=rank)
        cut = [math.prod(devices[len(devices) - 1 - axis] for axis in (one,) if axis >= 0) for one in axes]
        shape = [size_ // count for size_, count in zip(values.shape, cut, strict=True)]
        parts.append(part.reshape(shape[0] // max(size, 1), *shape[1:]))
    return parts, step, size


@pytest.mark.parametrize("name", CUTS)
def test_parts_are_where_mindspore_puts_them(name):
    devices, axes, optimizer = CUTS[name]
    values = np.arange(16 * 8, dtype=np.float32).reshape(16, 8)
    parts, _, size = parts_by_mindspore(values, devices, axes, optimizer)
    cut = tuple((len(devices) - 1 - axis,) if axis >= 0 else () for axis in axes)
    layout = Layout(devices, cut, max(size, 1))
    for rank, part in enumerate(parts):
        start = layout.start(rank, part.shape)
        assert layout.full_shape(part.shape) == values.shape
        there = tuple(slice(first, first + size) for first, size in zip(start, part.shape, strict=True))
        np.testing.assert_array_equal(values[there], part, err_msg=f"rank {rank}")


def strategy(layouts):
    """A strategy file of ``layouts``: name to (devices, axes, optimizer's step, its size)."""
    message = ParallelStrategyMap(current_stage=0)
    for name, (devices, axes, step, size) in layouts.items():
        item = message.parallel_layout_item.add(param_name=name)
        item.parallel_layouts.dev_matrix.add(dim=devices)
        for one in axes if isinstance(axes[0], tuple) else [axes]:
            item.parallel_layouts.tensor_map.add(dim=one)
        item.parallel_layouts.field = 0
        item.parallel_layouts.opt_weight_shard_step = step
        item.parallel_layouts.opt_weight_shard_size = size
    return message.SerializeToString()


@pytest.fixture(params=["ckpt", "safetensors"])
def cut_directory(tmp_path, request):
    """A model on 4 ranks: matrices cut in two ways, their optimizer in two more, biases and norms whole."""
    layouts, ranks = {}, [{} for _ in range(4)]
    for name, values in random_weights().items():
        if values.ndim == 1:
            layouts[name] = ((2, 2), (-1,), 0, 0)
            parts = [values] * 4
        else:
            axes, size = ((-1, 0), 0) if "wo" in name or "w2" in name else ((0, -1), 2)
            parts, step, size = parts_by_mindspore(values, (2, 2), axes, size)
            layouts[name] = ((2, 2), axes, step, size)
        for rank, part in enumerate(parts):
            ranks[rank][name] = np.ascontiguousarray(part)
    for rank, held in enumerate(ranks):
        path = tmp_path / "checkpoint" / f"rank_{rank}" / f"llama_rank_{rank}-1_4.{request.param}"
        save_ckpt(path, held) if request.param == "ckpt" else (path.parent.mkdir(parents=True), save_file(held, path))
        (tmp_path / "strategy").mkdir(exist_ok=True)
        (tmp_path / "strategy" / f"ckpt_strategy_rank_{rank}.ckpt").write_bytes(strategy(layouts))
    return tmp_path / "checkpoint"


def test_ranks_that_hold_parts_are_whole_with_their_strategy(cut_directory):
    assert_read(cut_directory)


def test_without_strategy_files_it_is_said_what_is_missing(cut_directory):
    for path in (cut_directory.parent / "strategy").iterdir():
        path.unlink()
    with pytest.raises(
        UserError, match=rf"{QUERY} float32\[4, 16\] instead of.*\n(.*\n)*its ranks may have parts: put the strategy"
    ):
        read_mindformers(cut_directory, MODEL)


def test_a_merged_strategy_names_the_stage(tmp_path):
    weights = {"a": np.arange(8, dtype=np.float32).reshape(4, 2)}
    for rank in range(4):
        half = weights["a"][2 * (rank % 2) :][:2] + 100 * (rank // 2)
        save_ckpt(tmp_path / f"rank_{rank}" / f"n_rank_{rank}-1_1.ckpt", {f"stage{rank // 2}": half})
    (tmp_path / "strategy").mkdir()
    merged = strategy({"0-stage0": ((2,), (0, -1), 0, 0), "1-stage1": ((2,), (0, -1), 0, 0)})
    (tmp_path / "strategy" / "merged.ckpt").write_bytes(merged)
    found = mindformers_tensors(tmp_path)
    np.testing.assert_array_equal(found["stage0"], weights["a"])
    np.testing.assert_array_equal(found["stage1"], weights["a"] + 100)


def test_an_axis_that_two_dimensions_cut(tmp_path):
    values = np.arange(8, dtype=np.float32)
    (tmp_path / "strategy").mkdir()
    (tmp_path / "strategy" / "merged.ckpt").write_bytes(strategy({"a": ((2, 2), ((1, 0),), 0, 0)}))
    # One map only: that of a vector whose axis both dimensions cut would look like a matrix.
    message = ParallelStrategyMap.FromString((tmp_path / "strategy" / "merged.ckpt").read_bytes())
    message.parallel_layout_item[0].parallel_layouts.tensor_map.add(dim=[-1])
    (tmp_path / "strategy" / "merged.ckpt").write_bytes(message.SerializeToString())
    for rank in range(4):
        save_ckpt(
            tmp_path / f"rank_{rank}" / f"n_rank_{rank}-1_1.ckpt", {"a": values[2 * rank : 2 * rank + 2].reshape(2, 1)}
        )
    np.testing.assert_array_equal(mindformers_tensors(tmp_path)["a"], values.reshape(8, 1))


def test_mistakes_are_named(tmp_path, cut_directory):
    (cut_directory.parent / "strategy" / "ckpt_strategy_rank_1.ckpt").write_bytes(b"\x1a\x05abc")
    with pytest.raises(UserError, match=r"ckpt_strategy_rank_1.ckpt: not a strategy file of MindSpore"):
        read_mindformers(cut_directory, MODEL)
    (cut_directory / "rank_2").rename(cut_directory / "rank_9")
    with pytest.raises(UserError, match=r"rank_2 is missing, but rank_9 exists"):
        read_mindformers(cut_directory, MODEL)
    (cut_directory / "rank_9").rename(cut_directory / "rank_2")
    for path in (cut_directory / "rank_3").iterdir():
        path.unlink()
    with pytest.raises(UserError, match=r"rank_3 has no .safetensors or .ckpt"):
        read_mindformers(cut_directory, MODEL)


def test_several_files_beside_one_another(tmp_path):
    for step in (1, 2):
        save_ckpt(tmp_path / f"llama-1_{step}.ckpt", random_weights())
    with pytest.raises(
        UserError, match=r"has 2 files of MindSpore \(llama-1_1.ckpt, llama-1_2.ckpt\); pass one of them"
    ):
        read_mindformers(tmp_path, MODEL)


def test_differences_are_named_as_the_file_names_them(tmp_path):
    theirs = mcore(random_weights())
    del theirs["decoder.layers.1.self_attention.linear_qkv.weight"]
    theirs["decoder.layers.0.mlp.linear_fc1.weight"] = np.zeros((40, 16), np.float32)
    theirs["decoder.layers.0.mlp.router.weight"] = np.zeros((4, 16), np.float32)
    save_file(theirs, tmp_path / "a.safetensors")
    with pytest.raises(UserError) as error:
        read_mindformers(tmp_path / "a.safetensors", MODEL)
    assert "missing (1): decoder.layers.1.self_attention.linear_qkv.weight float32[32, 16]" in str(error.value)
    assert "decoder.layers.0.mlp.linear_fc1.weight float32[40, 16] instead of float32[48, 16]" in str(error.value)
    assert "surplus (1): decoder.layers.0.mlp.router.weight float32[4, 16]" in str(error.value)


def test_concatenated_matrices_of_legacy_models_are_refused_with_the_reason(tmp_path):
    weights = random_weights()
    weights["model.layers.0.attention.w_qkv.weight"] = weights.pop("model.layers.0.attention.wq.weight")
    save_file(weights, tmp_path / "a.safetensors")
    with pytest.raises(UserError, match="saved with qkv_concat, whose order of rows differs between releases"):
        read_mindformers(tmp_path / "a.safetensors", MODEL)


def test_mcore_names_of_other_families_are_not_guessed(tmp_path):
    save_file(mcore(random_weights()), tmp_path / "a.safetensors")
    with pytest.raises(UserError, match=r"read for models like Llama only: .*norm.* has no name in them here"):
        read_mindformers(tmp_path / "a.safetensors", MODEL.model_copy(update={"qk_layernorm": True}))


def test_checkpoints_of_ours_and_of_hugging_face_are_not_taken_for_it(tmp_path):
    for name in ("manifest.json", "config.json"):
        directory = tmp_path / name
        directory.mkdir()
        (directory / name).write_text("{}")
        (directory / "model.safetensors").write_bytes(b"")
        assert not is_mindformers(directory)
    assert not is_mindformers(tmp_path)
    assert not is_mindformers(tmp_path / "manifest.json" / "model.safetensors")
