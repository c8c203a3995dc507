"""All ranks of a tiny model of each family compute what one device does; published sizes compile in their parallel form."""

from pathlib import Path

import pytest

pytest.importorskip("torch")

from references import REFERENCES, random_tiny
from small_cluster import cluster_run
from tiny_families import TINY

from mindllm.compiled.rank.compile_rank import compile_rank
from mindllm.config import load_config
from mindllm.families import FAMILIES
from mindllm.reduced_runs.model import reduce_model
from mindllm.verify.check import check
from mindllm.verify.outcome import Options

ALWAYS = "gemma2"  # two kinds of layers, soft caps, norms behind, a tied head
PRETRAIN = sorted((Path(__file__).parents[2] / "configs").rglob("pretrain_*.yaml"))
SIZES = {"vocab_size": 96, "seq_length": 32}
OF_TYPE = {family.name: family for family in FAMILIES}
CONTENTS = {name: (OF_TYPE[content["model_type"]], content) for name, content in TINY.items()}
FOUR_HEADS = {"num_heads": 4, "hidden_size": 32, "head_dim": 8, "n_kv_heads": 4}
OTHER_SIZES = dict.fromkeys(("baichuan-13b", "baichuan2-13b"), FOUR_HEADS)
OTHER_SIZES |= {"bloom": FOUR_HEADS | {"intermediate_size": 128}}


def slow_unless(name):
    return pytest.param(name, marks=[] if name == ALWAYS else pytest.mark.slow)


def tiny_keys(name):
    """Keys of ``model_config`` of a tiny model, from the table of its family or, where that has none, of its reference."""
    if name in CONTENTS:
        family, content = CONTENTS[name]
    else:
        content = random_tiny(name).config
        family = OF_TYPE[content["model_type"]]
    model = family.model(Path("config.json"), content)
    return model.model_dump(mode="json", exclude_unset=True) | SIZES | OTHER_SIZES.get(name, {})


@pytest.mark.parametrize("name", [slow_unless(name) for name in (*CONTENTS, *REFERENCES)])
def test_all_ranks_compute_what_one_device_does(name, graph_cache):
    model = tiny_keys(name)
    run = cluster_run(dp=2, tp=2, use_seq_parallel=True, model=model | {"compute_dtype": "float32"})
    outcome = check(run, Options(cache=graph_cache))
    assert outcome.ok, (outcome.problems[:3], outcome.first_difference)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # DeepSeek-V3, beside other work
@pytest.mark.parametrize("path", PRETRAIN, ids=lambda path: path.stem)
def test_a_shipped_size_compiles_in_its_parallel_form(path):
    config = load_config(path)
    if config.parallel_config.device_num > 1:
        assert compile_rank(reduce_model(config), 0).parameters
