"""AdaLoRA and GaLore on devices that share the model: planted mistakes are found, and checkpoints go on under another layout."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from execute_clusters import Compiled, compiled_cluster, judged, tampered

from mindllm.compiled.execute.exchange import Deadlock
from mindllm.compiled.graph.compiled_graph import CompiledGraph, Node
from mindllm.reduced_runs.model import single_device
from mindllm.train.checkpoint import CheckpointStore, load_checkpoint
from mindllm.train.optimizers.adalora import OVERLAP_OF_FIRST, OVERLAP_OF_SECOND
from mindllm.train.part_exchange import ADDS
from mindllm.verify import resume
from mindllm.verify.compare import TOLERANCES, cluster_parts, compare
from mindllm.verify.side import build_cluster, run_step
from mindllm.verify.single import SingleDevice

LAYOUTS = ("neighbours", "stages", "slices")


def at(*cells: str):
    """Whether an operator exchanges inside of these cells."""
    return lambda node: node.exchanges and all(f"{cell}" in node.scope for cell in cells)


def adding(what: str):
    """Whether an operator adds this up over parts of a weight."""
    return lambda node: node.attributes.get(ADDS) == what


def dropped(node: Node) -> list[Node]:
    """A device's own part instead of the sum, or of all parts."""
    return [replace(node, op="TensorMove")]


def found_in(cluster: Compiled, graphs: list[CompiledGraph]) -> tuple[str, ...]:
    """What the check says of graphs, ranks that wait for each other among it."""
    try:
        return judged(cluster, graphs).problems
    except Deadlock as waiting:
        return (str(waiting),)


MISTAKES = {
    "a budget for each stage": ("ranks of stages", at("ScoresOfAll"), "kept_ranks"),
    "overlaps of parts of B": ("ranks of neighbours", adding(OVERLAP_OF_SECOND), "lora_b"),
    "overlaps of parts of A": ("ranks of neighbours", adding(OVERLAP_OF_FIRST), "lora_a"),
    "the norm of a part": ("ranks of neighbours", at("PartNorm"), "no rank can go on"),  # one alone skips
    "products of parts": ("projections of neighbours", at("over_longer"), "projection."),
    "parts of projected gradients": ("projections of neighbours", at("over_shorter"), "adam_m."),
}
QUICK = ("a budget for each stage", "parts of projected gradients")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in MISTAKES]
)
def test_what_is_not_exchanged_is_found(name, graph_cache):
    case, where, word = MISTAKES[name]
    cluster = compiled_cluster(case, graph_cache)
    assert judged(cluster).ok
    problems = found_in(cluster, [tampered(graph, where, dropped) for graph in cluster.graphs])
    assert any(word in problem for problem in problems), problems[:3]


def test_a_step_behind_a_resume_is_that_of_a_run_that_went_on(graph_cache, monkeypatch):
    """With the frozen weights that checkpoints of adapters do not hold. Lost moments change no loss, but every update."""
    cluster = compiled_cluster("ranks of stages", graph_cache)
    arguments = cluster.config, cluster.graphs, cluster.reference
    assert resume.resume_problems(*arguments) == ()

    def forgetful(path):
        kept = load_checkpoint(path)
        moments = {name: np.asarray(item) for name, item in kept.optimizer.items()}
        lost = {name: np.zeros_like(item) if name.startswith("adam_m.") else item for name, item in moments.items()}
        return replace(kept, optimizer=lost)

    monkeypatch.setattr(resume, "load_checkpoint", forgetful)
    problems = resume.resume_problems(*arguments)
    assert {problem.partition(",")[0] for problem in problems} == {
        "resumed on its own layout",
        "resumed on a single device",
    }
    assert all("loss: " not in problem for problem in problems)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ranks", "projections"])
def test_a_checkpoint_goes_on_under_another_layout(kind, graph_cache, tmp_path):
    clusters = {layout: compiled_cluster(f"{kind} of {layout}", graph_cache) for layout in LAYOUTS}
    for name, compiled in clusters.items():
        reference = compiled.reference
        first, *_, last = reference.tasks
        trained = build_cluster(compiled.config, compiled.graphs, {**reference.frozen, **reference.initial})
        trained.step(first.batch, first.rate, first.scale)
        path = CheckpointStore(tmp_path / name, keep_checkpoint_max=9).save(1, trained.local_state(), {"step": 1})
        checkpoint = load_checkpoint(path)
        kept = {key: np.array(item) for key, item in {**checkpoint.weights, **checkpoint.optimizer}.items()}
        assert kept.keys() == reference.initial.keys()
        assert all(kept[key].shape == whole.shape for key, whole in reference.initial.items())
        for other in clusters.values():
            resumed = build_cluster(other.config, other.graphs, {**reference.frozen, **kept})
            found = run_step(resumed, other.config, last)
            tolerance = TOLERANCES["float32"]
            compared = compare(reference.results[-1], reference.states[-1], found, cluster_parts(resumed), tolerance)
            assert compared.problems() == [], (name, other.config.parallel_config)
        device = SingleDevice(single_device(compiled.config))
        device.engine.load_state({**reference.frozen, **kept})
        assert device.step(last).loss == pytest.approx(reference.results[-1].loss, rel=1e-5)
        state = device.state()
        assert all(np.allclose(state[key], item, atol=1e-5) for key, item in reference.states[-1].items())
