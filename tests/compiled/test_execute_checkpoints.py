"""A checkpoint saved in parts under one layout loads under any other: bit-equal, and training goes on as on one device."""

from __future__ import annotations

import numpy as np
import pytest
from execute_clusters import compiled_cluster

from mindllm.reduced_runs.model import single_device
from mindllm.train.checkpoint import CheckpointStore, load_checkpoint
from mindllm.verify.side import build_cluster
from mindllm.verify.single import SingleDevice

LAYOUTS = ("biased", "stages", "slices")  # dp2 tp2 with sequence parallel; two stages; dp2 with optimizer parallel
STATE = {"step": 1}


@pytest.fixture(scope="module")
def clusters(graph_cache):
    return {name: compiled_cluster(name, graph_cache) for name in LAYOUTS}


def save(cluster, directory):
    return CheckpointStore(directory, keep_checkpoint_max=9).save(1, cluster.local_state(), STATE)


def whole(path):
    checkpoint = load_checkpoint(path)
    return {name: np.array(tensor) for name, tensor in {**checkpoint.weights, **checkpoint.optimizer}.items()}


def test_every_layout_loads_what_every_other_saved(clusters, tmp_path):
    for name, compiled in clusters.items():
        trained = build_cluster(compiled.config, compiled.graphs, compiled.reference.initial)
        first, *_, last = compiled.reference.tasks
        trained.step(first.batch, first.rate, first.scale)
        path = save(trained, tmp_path / name)
        kept = whole(path)
        assert kept.keys() == compiled.reference.initial.keys()
        for other_name, other in clusters.items():
            checkpoint = load_checkpoint(path)
            resumed = build_cluster(other.config, other.graphs, {**checkpoint.weights, **checkpoint.optimizer})
            again = whole(save(resumed, tmp_path / f"{name}_{other_name}"))
            assert all(np.array_equal(kept[key], again[key]) for key in kept)
            loss = resumed.step(last.batch, last.rate, last.scale).loss
            assert loss == pytest.approx(compiled.reference.results[-1].loss, rel=1e-5)


@pytest.mark.slow
def test_experts_go_on_under_another_division(graph_cache, tmp_path):
    """Trained on four groups of experts, resumed on two, and on one device."""
    four, two = (compiled_cluster(name, graph_cache) for name in ("experts of four groups", "experts"))
    trained = build_cluster(four.config, four.graphs, four.reference.initial)
    first, *_, last = four.reference.tasks
    trained.step(first.batch, first.rate, first.scale)
    checkpoint = load_checkpoint(save(trained, tmp_path))
    resumed = build_cluster(two.config, two.graphs, {**checkpoint.weights, **checkpoint.optimizer})
    device = SingleDevice(single_device(two.config))
    device.engine.load(checkpoint)
    wanted = pytest.approx(four.reference.results[-1].loss, rel=1e-5)
    assert resumed.step(last.batch, last.rate, last.scale).loss == wanted
    assert device.step(last).loss == wanted


def test_a_single_device_goes_on_from_the_parts_of_a_cluster(clusters, tmp_path):
    compiled = clusters["slices"]
    trained = build_cluster(compiled.config, compiled.graphs, compiled.reference.initial)
    first, *_, last = compiled.reference.tasks
    trained.step(first.batch, first.rate, first.scale)
    device = SingleDevice(single_device(compiled.config))
    device.engine.load(load_checkpoint(save(trained, tmp_path)))
    assert device.step(last).loss == pytest.approx(compiled.reference.results[-1].loss, rel=1e-5)
