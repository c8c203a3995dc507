"""The bench of planted mistakes: a few of each kind are found and located, and what is correct gives no alarm."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mindllm import verify
from mindllm.config import load_config
from mindllm.verify.locate import suspected

ROOT = Path(__file__).parents[2]
DIRECTORY = Path(verify.__file__).parent / "forms"
FORMS = sorted(path.stem for path in DIRECTORY.glob("*.yaml"))


@pytest.fixture(scope="module")
def bench():
    sys.path.insert(0, str(ROOT))
    try:
        from research.parallel_faults import bench
    finally:
        sys.path.remove(str(ROOT))
    return bench


@pytest.fixture(scope="module")
def cluster(bench, graph_cache):
    return bench.compiled_form("split_vocabulary", graph_cache)


def test_a_correct_cluster_gives_no_alarm(bench, cluster):
    assert not bench.answer(cluster, cluster.graphs).found_by
    assert suspected(cluster.config, cluster.graphs, cluster.reference, 0, cluster.alone) == ""


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_nothing_is_suspected_in_a_correct_form(form, bench, graph_cache):
    correct = bench.compiled_form(form, graph_cache)
    assert suspected(correct.config, correct.graphs, correct.reference, 0, correct.alone) == ""


@pytest.mark.parametrize(
    "name",
    [
        "gradient not summed 2",
        "norm over one rank 1",
        "rows gathered in another order 2",
        "rows scattered in another order 2",
        "one rank's product 1",
        "a weight not updated 1",
        "gradient of gathered rows averaged 1",
        "gradient of an activation missing 1",
        "one rank's gradient 1",
        "loss scaled by the size of a group 1",
    ],
)
def test_a_planted_mistake_is_found_and_located(name, bench, cluster):
    fault = next(one for one in bench.faults_of("split_vocabulary", cluster.graphs) if one.name.endswith(name))
    row = bench.row_of(cluster, fault)
    assert row.found
    assert row.located, (row.places, row.where)


def test_a_gradient_is_said_to_be_of_its_forward_operator(bench, cluster):
    fault = next(
        one for one in bench.faults_of("split_vocabulary", cluster.graphs) if one.name.endswith("one rank's gradient 1")
    )
    where = bench.row_of(cluster, fault).where
    assert "in the backward pass of MatMul at model.layers.1.feed_forward.w2" in where


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "name", "said"),
    [
        ("sharded_accumulators", "accumulation lost 1", "no gradient is added to accu_grads.lm_head.weight on rank 2"),
        (
            "accumulation",
            "gradient of activations not summed 1",
            "the gradient of the loss divided over ranks 0, 1, and never",
        ),
        ("accumulation", "slice of the first rank 3", "or those of another rank, since StridedSlice at"),
    ],
)
def test_what_is_missing_or_of_another_rank_is_said(form, name, said, bench, graph_cache):
    several = bench.compiled_form(form, graph_cache)
    fault = next(one for one in bench.faults_of(form, several.graphs) if one.name.endswith(name))
    row = bench.row_of(several, fault)
    assert row.located
    assert said in row.where


def test_names_are_right_in_the_cell_around_and_wrong_in_another(bench):
    at = "Add on rank 0 at Default/network-SeededLoss/network-CausalLM/model-Decoder/layers-CellList/1-Layer/wo-Linear/Add-op0"
    assert bench.locates(at, ("model.layers.1.wo",))
    assert bench.locates(at, ("model.layers.1.wo.weight",))
    assert not bench.locates(at, ("model.layers.0.wo",))
    assert not bench.locates("", ("model.layers.1.wo",))


def test_every_correct_variation_is_a_run(bench):
    found = bench.variations()
    assert len(found) == 42
    for form, _, keys in found:
        load_config(DIRECTORY / f"{form}.yaml", keys)


def test_every_edit_of_sources_has_its_place(bench, tmp_path):
    """What is planted is one line of the sources as they are, and the result is Python."""
    from research.parallel_faults import sources

    for number, edit in enumerate(sources.edits()):
        root = tmp_path / str(number)
        file = root / "mindllm" / edit.file
        file.parent.mkdir(parents=True)
        file.write_text((ROOT / "mindllm" / edit.file).read_text(encoding="utf-8"), encoding="utf-8")
        sources.planted(root, edit)
        compile(file.read_text(encoding="utf-8"), edit.file, "exec")
        assert edit.form in FORMS
    with pytest.raises(ValueError, match="has 0 times"):
        sources.planted(root, edit)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["codes are not split", "weights of experts are not divided", "messages of the head"])
def test_an_edit_of_sources_is_found(what, bench):
    from research.parallel_faults import sources

    (row,) = sources.edit_rows(what, print)
    assert row.found_by == "check"
    assert row.located
