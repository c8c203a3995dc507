"""Strategies whose sequences go through the pipeline in pieces: tried where they are asked for, and each loads as a run."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from mindllm.architecture.layer_counts import IN_PIECES, ONE_F_ONE_B, SEQPIPE
from mindllm.cli.search import main
from mindllm.config import load_config, override_config
from mindllm.reduced_runs.even import even_keys
from mindllm.strategies.candidates import Candidate, candidates
from mindllm.strategies.judge import judge, read_judged
from mindllm.strategies.search import evaluate_current, plan_candidate
from mindllm.timing.configured import workload_of
from mindllm.timing.device import DEFAULT, read_device
from mindllm.units import GIB
from toolkit.benchmark.tune_shipped import SHIPPED

YAML = SHIPPED / "llama2" / "pretrain_llama2_13b.yaml"
DEVICE, LIMIT = read_device(DEFAULT), 58 * GIB
PIECES = Candidate(2, 1, 8, 1, 1, 8, False, True, schedule=SEQPIPE, pieces=4)


def tried(config, schedules, batch=None):
    return list(candidates(config, 16, batch or config.global_batch_size, DEVICE, Counter(), schedules))


def test_pieces_are_tried_beside_whole_sequences_and_load():
    config = load_config(YAML)
    usual, every = tried(config, (ONE_F_ONE_B,)), tried(config, (ONE_F_ONE_B, *IN_PIECES))
    ordered = [one for one in every if one.schedule != ONE_F_ONE_B]
    assert [one for one in every if one.schedule == ONE_F_ONE_B] == usual
    assert {one.pieces for one in ordered} == {1, 2, 4, 8}
    assert {one.schedule for one in ordered} == set(IN_PIECES)
    assert len({one.name for one in every}) == len(every)
    for one in ordered[:: len(ordered) // 12]:
        run = override_config(config, {**even_keys(config, one.pipeline_stage, one.chunks), **one.overrides()})
        assert evaluate_current(run, DEVICE).candidate == one


def test_pieces_fill_stages_that_micro_batches_do_not():
    few = [one for one in tried(load_config(YAML), (ONE_F_ONE_B, SEQPIPE), 8) if one.micro_batches < one.pipeline_stage]
    assert few
    assert all(one.pieces * one.micro_batches >= one.pipeline_stage and one.chunks == 1 for one in few)


@pytest.mark.parametrize("key", ["parallel.parallel_optimizer_config.gradient_accumulation_shard", "swap_config.swap"])
def test_what_does_not_come_in_pieces_is_not_tried(key):
    config = load_config(YAML, [f"--{key}=true"])
    assert all(one.pieces == 1 for one in tried(config, (ONE_F_ONE_B, *IN_PIECES)))


def test_it_is_judged_and_planned_as_the_run_that_is_written():
    config = load_config(YAML)
    judged = judge(config, workload_of(config), PIECES, DEVICE, LIMIT)
    assert read_judged(json.loads(json.dumps(judged.tree()))).candidate == PIECES
    assert max(judged.memory) <= LIMIT
    planned = plan_candidate(config, PIECES, DEVICE, LIMIT, 2.0)
    assert evaluate_current(planned.config, DEVICE).candidate == PIECES
    assert (planned.step.times.schedule, planned.step.times.pieces) == (SEQPIPE, 4)
    assert planned.step.tokens_per_device >= judged.speed * 0.999
    assert max(planned.memory) <= LIMIT


def test_the_best_of_them_is_written(tmp_path, capsys):
    options = [
        "--devices",
        "8",
        "--global_batch",
        "8",
        "--schedules",
        SEQPIPE,
        "--best",
        "1",
        "--seconds",
        "1",
        "--json",
    ]
    written = ["--output", str(tmp_path), "--apply", str(tmp_path / "best.yaml")]
    assert main(["--config", str(YAML), *options, *written]) == 0
    found = json.loads(capsys.readouterr().out)["best"][0]["strategy"]
    run = load_config(tmp_path / "best.yaml")
    assert (found["schedule"], found["pieces"]) == (SEQPIPE, run.parallel_config.seq_split_num)
    assert run.parallel.pipeline_config.pipeline_scheduler == SEQPIPE
