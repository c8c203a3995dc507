"""The small model in place of the real one: everything that decides about sharding is as it was."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from small_cluster import cluster_run

from mindllm.config import RunConfig, load_config
from mindllm.parallel.layer_plan import make_plan
from mindllm.reduced_runs.model import reduce_model, single_device

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
SHIPPED = [path for path in sorted(CONFIGS.glob("*/*.yaml")) if path.parent.name != "base"]


def mesh(config: RunConfig) -> tuple[int, int, int]:
    sizes = config.parallel_config
    return sizes.data_parallel, sizes.model_parallel, sizes.pipeline_stage


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_configuration_becomes_small_and_stays_itself(path):
    config = load_config(path)
    small = reduce_model(config)
    spread = config.parallel_config.expert_parallel  # there are no fewer experts in a layer, and layers in every stage
    assert small.model.config.parameter_count() < 5_000_000 * max(1, 4 * (spread > 1), spread * (spread > 32))
    assert mesh(small) == mesh(config)
    assert small.parallel_config.use_seq_parallel == config.parallel_config.use_seq_parallel
    assert small.parallel_config.vocab_emb_dp == config.parallel_config.vocab_emb_dp
    assert small.parallel.pipeline_config == config.parallel.pipeline_config
    assert small.parallel.enable_parallel_optimizer == config.parallel.enable_parallel_optimizer
    assert small.model.config.pp_interleave_num == config.model.config.pp_interleave_num
    assert small.model.config.compute_dtype == "float32"
    assert reduce_model(config, real_dtype=True).model.config.compute_dtype == config.model.config.compute_dtype
    devices = math.prod(mesh(config)[:2])
    for key in ("hidden_size", "vocab_size", "intermediate_size"):
        real, little = getattr(config.model.config, key), getattr(small.model.config, key)
        assert math.gcd(real, devices) == math.gcd(little, devices)
    kinds = [{(layer.stage, layer.recompute) for layer in make_plan(run).layers} for run in (config, small)]
    assert kinds[0] == kinds[1]
    assert single_device(small).global_batch_size == small.global_batch_size


def test_uneven_stages_and_partly_recomputed_stages_stay_so():
    model = {"num_layers": 12, "offset": [1, 0, -2, 1]}
    recompute = {"recompute": [2, 0, 1, 4], "select_recompute": {r"feed_forward\.mul": [3, 0, 0, 0]}}
    small = reduce_model(cluster_run(pp=4, micro=8, model=model, recompute_config=recompute))
    plan = make_plan(small)
    assert plan.counts == ((3, 1, 1, 1),)  # 4, 3, 1, 4 layers: every kind, and one more in the first long stage
    assert [layer.recompute for layer in plan.at(0, 0)] == [True, False, False]
    assert [bool(layer.patterns) for layer in plan.at(0, 0)] == [False, True, False]


def test_an_interleaved_plan_keeps_its_chunks():
    sections = {"parallel": {"pipeline_config": {"pipeline_interleave": True}}}
    small = reduce_model(cluster_run(pp=2, micro=16, model={"num_layers": 8, "pp_interleave_num": 2}, **sections))
    assert make_plan(small).counts == ((1, 1), (1, 1))
    assert small.parallel_config.micro_batch_num == 4


def test_one_place_of_a_chunk_stays_longer():
    """The first with more than an even split. The order of five numbers would take 14 layers more."""
    sections = {"parallel": {"pipeline_config": {"pipeline_interleave": True}}}
    offset = [[-2, -1, 0, 0], [0, 1, 2, 0]]
    model = {"num_layers": 40, "pp_interleave_num": 2, "offset": offset}
    plan = make_plan(reduce_model(cluster_run(pp=4, micro=16, model=model, **sections)))
    assert plan.counts == ((1, 1, 1, 1), (1, 2, 1, 1))


def test_a_size_that_devices_do_not_divide_stays_so():
    small = reduce_model(cluster_run(dp=4, model={"vocab_size": 1002}))
    assert math.gcd(small.model.config.vocab_size, 4) == 2


def test_the_threshold_of_the_parallel_optimizer_keeps_norms_whole():
    options = {"enable_parallel_optimizer": True, "parallel_optimizer_config": {"parallel_optimizer_threshold": 64}}
    small = reduce_model(cluster_run(dp=2, parallel=options))
    threshold = small.parallel.parallel_optimizer_config.parallel_optimizer_threshold * 1024
    model = small.model.config
    assert model.hidden_size * 4 < threshold < model.hidden_size * model.n_kv_heads * model.head_dim * 4


WINDOWS = {"num_layers": 8, "model_type": "qwen2", "qkv_has_bias": True, "sliding_window": 16, "seq_length": 64}
TYPES = ["full_attention"] * 3 + ["sliding_attention"] * 5


def test_every_kind_of_layer_stays_in_its_place():
    recompute = {"recompute": [2, 0]}
    small = reduce_model(
        cluster_run(pp=2, micro=2, model={**WINDOWS, "layer_types": TYPES}, recompute_config=recompute)
    )
    layers = zip(small.model.config.architecture.layers, make_plan(small).layers, strict=True)
    kinds = [(layer.stage, layer.recompute, spec.attention.window) for spec, layer in layers]
    assert kinds == [(0, True, None), (0, False, None), (0, False, 8), (1, False, 8)]


BALANCED = {"model_type": "mixtral", "expert_num": 4, "num_experts_chosen": 2, "aux_loss_factors": [0.01]}


def test_a_loss_of_a_micro_batch_is_computed_of_as_many_sequences():
    run = cluster_run(dp=2, pp=2, micro=2, model={**BALANCED, "aux_loss_types": ["switch"]})
    assert single_device(run).runner_config.gradient_accumulation_steps == 2
    assert single_device(run).global_batch_size == run.global_batch_size == 8


def test_a_loss_of_a_sequence_is_computed_at_once():
    run = cluster_run(dp=2, pp=2, micro=2, model={**BALANCED, "aux_loss_types": ["expert"]})
    assert single_device(run).runner_config.gradient_accumulation_steps == 1


def test_a_warm_up_longer_than_the_few_steps_is_shortened():
    run = cluster_run(
        runner_config={"train_steps": 5000}, lr_schedule={"type": "ConstantWarmUpLR", "warmup_steps": 2000}
    )
    assert reduce_model(run).lr_schedule.warmup_steps == reduce_model(run).runner_config.train_steps


@pytest.mark.parametrize(("steps", "asked", "left"), [(4, {}, 2), (4, {"accumulation_steps": 3}, 3), (1, {}, 1)])
def test_accumulation_steps_that_are_left(steps, asked, left):
    run = cluster_run(dp=2, runner_config={"gradient_accumulation_steps": steps})
    assert reduce_model(run, **asked).runner_config.gradient_accumulation_steps == left
