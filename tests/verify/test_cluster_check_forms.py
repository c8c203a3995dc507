"""Every form of recomputation, sharding and scheduling the YAML can ask for, executed and held against a single device."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindllm import verify
from mindllm.config import load_config
from mindllm.config.recompute import RecomputeConfig
from mindllm.verify.check import check
from mindllm.verify.locate import NOT_LOCATED_IN_PIECES, locate_within_memory
from mindllm.verify.outcome import Options

FORMS = sorted((Path(verify.__file__).parent / "forms").glob("*.yaml"))
CONFIGS = {path.stem: load_config(path) for path in FORMS}


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_a_form_computes_what_one_device_does(name, graph_cache):
    outcome = check(CONFIGS[name], Options(cache=graph_cache))
    assert outcome.ok, (outcome.problems[:3], outcome.first_difference)
    assert all(item.cluster.norms[0] > 0.1 for item in outcome.comparisons if not item.single.overflow), "not clipped"


@pytest.mark.parametrize("key", RecomputeConfig.model_fields)
def test_every_kind_of_recomputation_is_among_the_forms(key):
    default = RecomputeConfig.model_fields[key].default
    assert any(getattr(config.recompute_config, key) != default for config in CONFIGS.values())


def test_every_way_to_divide_the_work_is_among_the_forms():
    parallel = [config.parallel for config in CONFIGS.values()]
    assert {config.sends_tokens for config in CONFIGS.values() if config.model.config.moe_grouped_gemm} == {True, False}
    sizes = [config.parallel_config for config in CONFIGS.values()]
    assert {run.full_batch for run in parallel} == {True, False}
    assert {run.pipeline_config.pipeline_scheduler for run in parallel} == {
        *("1f1b", "gpipe", "zero_bubble_v", "seqpipe", "seqvpp", "seqsmartvpp"),
    }
    assert {run.parallel_optimizer_config.gradient_accumulation_shard for run in parallel} == {True, False}
    assert {run.parallel_optimizer_config.optimizer_weight_shard_size for run in parallel} == {-1, 2}
    assert {size.vocab_emb_dp for size in sizes} == {True, False}
    assert max(size.pipeline_stage for size in sizes) == 4
    assert {size.expert_parallel for size in sizes} == {1, 2}
    assert {size.seq_split_num for size in sizes} == {1, 2, 4}
    assert {size.context_parallel_balanced for size in sizes} == {True, False}
    assert {size.context_parallel_algo for size in sizes if size.context_parallel > 1} == {
        "colossalai_cp",
        "ulysses_cp",
        "ring_cp",
    }


def test_where_a_difference_of_pieces_begins_is_not_looked_for():
    assert locate_within_memory(CONFIGS["pieces"], [], None, 0, None) == NOT_LOCATED_IN_PIECES
