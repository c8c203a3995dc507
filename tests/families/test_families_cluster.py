"""All ranks of a tiny model of each family compute what one device does; published sizes compile in their parallel form."""

from pathlib import Path

import pytest
from small_cluster import cluster_run

from mindllm.compiled.compile_rank import compile_rank
from mindllm.config import load_config
from mindllm.config.families import FAMILIES
from toolkit.cluster_check.check import Options, check
from toolkit.cluster_check.scale import scaled

ALWAYS = "gemma2"  # two kinds of layers, soft caps, norms behind, a tied head
PRETRAIN = sorted((Path(__file__).parents[2] / "configs").rglob("pretrain_*.yaml"))
SIZES = {"vocab_size": 96, "seq_length": 32}
CASES = {
    **{
        name: family.model(Path("config.json"), content) for family in FAMILIES for name, content in family.tiny.items()
    },
}
FOUR_HEADS = {"bloom": {"num_heads": 4, "hidden_size": 32, "intermediate_size": 128, "head_dim": 8, "n_kv_heads": 4}}


def slow_unless(name):
    return pytest.param(name, marks=[] if name == ALWAYS else pytest.mark.slow)


@pytest.mark.parametrize("name", map(slow_unless, CASES))
def test_all_ranks_compute_what_one_device_does(name, graph_cache):
    model = CASES[name].model_dump(mode="json", exclude_unset=True) | SIZES | FOUR_HEADS.get(name, {})
    run = cluster_run(dp=2, tp=2, use_seq_parallel=True, model=model | {"compute_dtype": "float32"})
    outcome = check(run, Options(cache=graph_cache))
    assert outcome.ok, (outcome.problems[:3], outcome.first_difference)


@pytest.mark.slow
@pytest.mark.parametrize("path", PRETRAIN, ids=lambda path: path.stem)
def test_a_shipped_size_compiles_in_its_parallel_form(path):
    config = load_config(path)
    if config.parallel_config.device_num > 1:
        assert compile_rank(scaled(config), 0).parameters
