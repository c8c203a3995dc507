"""Layers that differ are runs of their own, and stay what they are in smaller runs."""

import re

import pytest
from dry_run_cases import AHEAD
from small_cluster import RUN, cluster_run
from tiny_chat import save_tiny_chat_model

from mindllm.config import load_config
from mindllm.parallel.layer_plan import make_plan
from mindllm.parallel.stages import Stage, stages_of
from mindllm.reduced_runs.stage import Point, reduce_other_stages, reduce_to_stage

MODEL = {"num_layers": 12, "model_type": "gemma2", "sliding_window": 8, "sliding_window_pattern": 2, "seq_length": 32}
MODEL |= {
    "layernorm_zero_centered_gamma": True,
    "hidden_act": "gelu_tanh",
    "scale_embeddings": True,
    "sandwich_norm": True,
}


def test_a_run_for_each_kind_and_recomputation():
    config = cluster_run(pp=2, micro=2, model=MODEL, recompute_config={"recompute": [2, 0]})
    first, last = stages_of(config)
    assert first.recompute == "1 full (window), 1 full (global), 2 none (window), 2 none (global)"
    assert last.recompute == "3 none (window), 3 none (global)"
    assert first.likeness != last.likeness


def test_a_smaller_run_has_the_layers_it_was_asked_for():
    config = cluster_run(pp=2, micro=2, model=MODEL)
    stage = stages_of(config)[1]
    small, rank = reduce_to_stage(config, stage, Point((2, 1), 1, 2))
    windows = [layer.attention.window for layer in small.model.config.architecture.layers]
    assert windows == [None, 8, 8, None]
    assert rank == 1


def test_layers_of_one_kind_carry_no_specification():
    (stage,) = stages_of(cluster_run())
    assert [run.kind.spec for run in stage.runs] == [None]


def names(config):
    return [layer.name for layer in config.model.config.architecture.layers]


def test_what_layers_add_to_the_loss_goes_on_through_other_stages_of_smaller_runs():
    model = {**AHEAD, "num_layers": 6, "num_nextn_predict_layers": 0, "first_k_dense_replace": 1}
    config = cluster_run(pp=2, micro=2, model={**model, "aux_loss_types": ["expert"], "aux_loss_factors": [0.1]})
    first, last = stages_of(config)
    runs = [reduce_to_stage(config, first, Point((1, 1), 2, 2))[0], reduce_to_stage(config, last, Point((2,), 1, 2))[0]]
    runs += [reduce_other_stages(config, stage)[0] for stage in (0, 1)]
    for small in runs:
        ends = {layer.stage: number for number, layer in enumerate(make_plan(small).layers)}
        assert all(small.model.config.architecture.layers[number].adds_to_loss for number in ends.values())


def test_a_small_last_stage_of_dense_layers_stands_behind_dense_ones():
    """As the planner asks for: of a mixture, the last stage with layers of each type."""
    model = {**AHEAD, "num_layers": 6, "num_nextn_predict_layers": 0, "first_k_dense_replace": 1}
    first, last = stages_of(cluster_run(pp=2, micro=2, model=model))
    dense = Stage(1, last.rank, last.place, first.runs[:1], 1)
    small, _ = reduce_to_stage(cluster_run(pp=2, micro=2, model=model), dense, Point((2,), 1, 2))
    assert names(small) == ["global"] * 3


def test_layers_that_predict_ahead_stay_on_the_last_stage_of_every_smaller_run():
    config = cluster_run(pp=2, micro=2, model=AHEAD, recompute_config={"recompute": [0, 1]})
    first, last = stages_of(config)
    assert last.recompute == "1 full (global experts), 1 none (global experts), 1 none (global experts prediction)"
    small, rank = reduce_to_stage(config, first, Point((1, 1), 2, 2))
    assert names(small) == ["global", *["global experts"] * 2, "global experts prediction"]
    assert ([run.count for run in stages_of(small)[1].runs], rank) == ([1, 1], 0)
    small, rank = reduce_to_stage(config, last, Point((1, 2, 1), 1, 2))
    assert names(small) == [*["global experts"] * 4, "global experts prediction"]
    assert small.model.config.num_layers == 4
    assert [run.kind.recomputation for run in stages_of(small)[1].runs] == ["full", "none", "none"]


def test_names_of_a_smaller_run_get_the_numbers_of_the_whole_one():
    _, rename = reduce_other_stages(cluster_run(pp=2, micro=2, model={"num_layers": 8}), 1)
    for before, after in [
        ("network-CausalLM/model-Decoder/layers-CellList/1-DecoderLayer/Add", 4),
        ("model.layers.4.feed_forward.w1.weight", 7),
        ("model.dropout_keys.0", 3),
        ("model-Decoder/dropout_keys-CellList/2-Keys/Mul", 5),
    ]:
        number = next(part for part in re.split(r"[-./]", before) if part.isdigit())
        assert rename(before) == before.replace(number, str(after), 1)
    assert rename("model.norm_out.weight.layers1") == "model.norm_out.weight.layers1"


@pytest.mark.parametrize("key", ["load_checkpoint", "pretrained_model_dir"])
def test_a_run_of_a_model_directory_becomes_smaller_without_it(key, tmp_path):
    """The directory says how many layers there are, and nothing is loaded to measure."""
    directory = save_tiny_chat_model(tmp_path / "model")
    begins = {"run_mode": "finetune", "load_checkpoint": "weights", key: str(directory)}
    config = load_config({**RUN, **begins, "use_parallel": False, "model": {}})
    small, _ = reduce_to_stage(config, stages_of(config)[0], Point((1,), 1, 1))
    other, _ = reduce_other_stages(config, 0)
    whole = config.model.config
    assert whole.num_layers > 1
    assert (small.model.config.num_layers, small.model.config.vocab_size) == (1, whole.vocab_size)
    assert other.model.config.architecture == whole.architecture
    assert (small.load_checkpoint, small.pretrained_model_dir) == ("", "")


CHUNKS = {"parallel": {"pipeline_config": {"pipeline_interleave": True}}}


@pytest.mark.parametrize(("number", "stages", "there"), [(0, 2, 0), (1, 4, 1), (2, 4, 1), (3, 2, 1)])
def test_a_short_pipeline_shows_the_place_of_a_stage_and_all_kinds_of_its_chunks(number, stages, there):
    model = {"num_layers": 16, "pp_interleave_num": 4}
    recompute = {"recompute": [[0] * 4, [0] * 4, [1] * 4, [0] * 4]}
    config = cluster_run(tp=2, pp=4, micro=16, model=model, recompute_config=recompute, **CHUNKS)
    stage = stages_of(config)[number]
    small, rank = reduce_to_stage(config, stage, Point((1,) * 4, 1, 2, short=2))
    assert (small.parallel_config.pipeline_stage, rank) == (stages, there * 2)
    held = stages_of(small)[there]
    assert held.place == stage.place
    assert [(run.chunk, run.kind.recompute) for run in held.runs] == [(0, False), (1, False), (2, True)]
    assert [run.chunk for run in stages_of(reduce_to_stage(config, stage, Point((1,) * 4, 1, 2, 4))[0])[there].runs] == [
        0, 1, 2, 3,
    ]  # fmt: skip
