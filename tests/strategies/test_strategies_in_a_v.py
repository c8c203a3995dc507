"""Strategies whose chunks lie in a V: tried where they are asked for, judged and planned in MindSpore's order of operations."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest

from mindllm.architecture.layer_counts import ONE_F_ONE_B, ZERO_BUBBLE_V
from mindllm.cli.search import main
from mindllm.config import load_config
from mindllm.strategies.candidates import Candidate, candidates
from mindllm.strategies.judge import judge
from mindllm.strategies.search import evaluate_current, plan_candidate
from mindllm.timing.configured import workload_of
from mindllm.timing.device import DEFAULT, read_device
from mindllm.units import GIB
from toolkit.benchmark.tune_shipped import SHIPPED

YAML = SHIPPED / "llama2" / "pretrain_llama2_13b.yaml"
DEVICE, LIMIT = read_device(DEFAULT), 58 * GIB
IN_A_V = Candidate(4, 2, 2, 2, 1, 16, True, True, schedule=ZERO_BUBBLE_V)


def tried(config, schedules):
    return list(candidates(config, 16, config.global_batch_size, DEVICE, Counter(), schedules))


def test_a_v_is_tried_wherever_two_chunks_have_enough_micro_batches():
    config = load_config(YAML)
    usual, both = tried(config, (ONE_F_ONE_B,)), tried(config, (ONE_F_ONE_B, ZERO_BUBBLE_V))
    folded = [one for one in both if one.v_shape]
    assert [one for one in both if not one.v_shape] == usual
    possible = [one for one in usual if one.chunks == 2 and one.micro_batches >= 2 * one.pipeline_stage]
    assert folded == [replace(one, schedule=ZERO_BUBBLE_V) for one in possible]
    assert len({one.name for one in both}) == len(both)
    sharded = load_config(YAML, ["--parallel.parallel_optimizer_config.gradient_accumulation_shard=true"])
    assert not any(one.v_shape for one in tried(sharded, (ONE_F_ONE_B, ZERO_BUBBLE_V)))


def test_it_is_judged_and_planned_as_the_run_that_is_written():
    config = load_config(YAML)
    judged = judge(config, workload_of(config), IN_A_V, DEVICE, LIMIT)
    assert judged is not None
    assert max(judged.memory) <= LIMIT
    planned = plan_candidate(config, IN_A_V, DEVICE, LIMIT, 20.0)
    assert planned.config.parallel.pipeline_config.v_shape
    assert evaluate_current(planned.config, DEVICE).candidate == IN_A_V
    assert planned.step.times.schedule == ZERO_BUBBLE_V
    assert planned.step.tokens_per_device >= judged.speed * 0.999


def test_the_best_of_them_is_written(tmp_path, capsys):
    arguments = [
        str(YAML),
        "--schedules",
        ZERO_BUBBLE_V,
        "--best",
        "1",
        "--seconds",
        "1",
        "--json",
        "--output",
        str(tmp_path),
    ]
    assert main([*arguments[1:], "--config", arguments[0], "--apply", str(tmp_path / "best.yaml")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["best"][0]["strategy"]["schedule"] == ZERO_BUBBLE_V
    assert load_config(tmp_path / "best.yaml").parallel.pipeline_config.v_shape


def test_an_order_that_is_none_is_refused(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--config", str(YAML), "--schedules", "gpipe"])
    assert ended.value.code == 2
    assert "invalid choice: 'gpipe'" in capsys.readouterr().err
