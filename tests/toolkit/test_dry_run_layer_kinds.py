"""Layers that differ are runs of their own, and stay what they are in smaller runs."""

from small_cluster import cluster_run

from toolkit.dry_run.reduced import Point, reduced_run
from toolkit.dry_run.stages import stages_of

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
    small, rank = reduced_run(config, stage, Point((2, 1), 1, 2))
    windows = [layer.attention.window for layer in small.model.config.architecture.layers]
    assert windows == [8, 8, 8, None]
    assert rank == 1


def test_layers_of_one_kind_carry_no_specification():
    (stage,) = stages_of(cluster_run())
    assert [run.kind.spec for run in stage.runs] == [None]
