"""The dispatch of experts belongs to the search; a capacity that a YAML sets is not changed unless a person permits it."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest
from small_cluster import cluster_run

from mindllm.cli.search import main
from mindllm.config import override_config, render_config, tree_of
from mindllm.config.checks.layers import check_experts
from mindllm.errors import UserError
from mindllm.reduced_runs.even import even_keys
from mindllm.strategies.candidates import can_dispatch, candidates, read_candidate
from mindllm.strategies.constraints import Constraints
from mindllm.strategies.dispatch import Dispatch, describe_changes, with_dispatch
from mindllm.strategies.judge import judge
from mindllm.strategies.low_utilisation import EMPTY_PLACES, utilisation_causes
from mindllm.strategies.outcome import Wanted, find_strategies
from mindllm.strategies.search import evaluate_current, judge_some
from mindllm.timing.configured import workload_of
from mindllm.timing.device import DEFAULT, read_device
from mindllm.units import GIB

DEVICE, LIMIT = read_device(DEFAULT), 58 * GIB
MIXTURE = {
    "model_type": "mixtral", "num_layers": 4, "hidden_size": 1024, "num_heads": 8, "n_kv_heads": 8, "intermediate_size": 2816,
    "seq_length": 2048, "vocab_size": 32000, "expert_num": 8, "num_experts_chosen": 2, "compute_dtype": "bfloat16",
}  # fmt: skip
SORTED = {"capacity_factor": None, "moe_grouped_gemm": True}


def mixture(**model):
    return cluster_run(dp=8, expert_parallel=8, model={**MIXTURE, **model}, runner_config={"batch_size": 1})


def tried(config, forms=(), devices=8):
    return list(candidates(config, devices, 16, DEVICE, Counter(), forms=forms))


def found(config, **wanted):
    return find_strategies(config, DEVICE, Wanted(best=1, seconds=1.0, **wanted))


def test_without_a_capacity_all_forms_that_compute_the_same_are_tried():
    every = tried(mixture())
    assert {one.dispatch.form for one in every} == {"alltoall", "allgather"}
    assert {one.dispatch for one in every if one.expert_parallel == 1} == {Dispatch(grouped=True)}
    assert {one.expert_model_parallel for one in every} == {1}
    assert len({one.name for one in every}) == len(every)
    assert tried(mixture(), ("alltoall", "allgather", "alltoall")) == every
    assert all(read_candidate(json.loads(json.dumps(one.tree()))) == one for one in every)


def test_a_capacity_of_the_yaml_stays_unless_a_person_permits_other_forms():
    config = mixture(capacity_factor=1.5)
    assert {one.dispatch for one in tried(config)} == {Dispatch(1.5)}
    every = {
        one.dispatch.form: one.dispatch.capacity_factor
        for one in tried(config, ("places", "alltoall"))
        if one.expert_parallel > 1
    }
    assert every == {"places": 1.5, "alltoall": None}


def test_every_candidate_is_a_run_that_loads():
    config = mixture(num_nextn_predict_layers=0)
    every = tried(config, ("places", "allgather", "alltoall"))
    for one in every[:: len(every) // 24]:
        run = override_config(config, {**even_keys(config, one.pipeline_stage, one.chunks), **one.overrides()})
        assert evaluate_current(run, DEVICE).candidate == one


def test_forms_that_mindspore_does_not_compile_are_left_out():
    """Sorted experts without replicas, whose batch a parallel optimizer takes in parts."""
    config, left_out = mixture(), Counter()
    every = list(candidates(config, 8, 16, DEVICE, left_out, forms=("alltoall",)))
    assert left_out["MindSpore does not compile this dispatch of experts on this mesh"] > 0
    in_parts = [one for one in every if one.pipeline_stage == 1 and one.micro_batches > 1 and one.expert_parallel == 8]
    assert in_parts
    assert not any(one.optimizer_shard for one in in_parts)
    refused = replace(in_parts[0], optimizer_shard=True)
    assert not can_dispatch(config, refused)
    with pytest.raises(UserError, match="gradients of sorted experts without replicas"):
        override_config(config, refused.overrides())


def test_a_candidate_is_judged_with_its_own_dispatch():
    config = mixture()
    one = next(one for one in tried(config) if one.dispatch.sends and one.optimizer_shard and one.pipeline_stage == 1)
    judged = judge(config, workload_of(with_dispatch(config, one.dispatch)), one, DEVICE, LIMIT)
    as_run = evaluate_current(override_config(config, {**even_keys(config, 1, 1), **one.overrides()}), DEVICE)
    assert judged.speed == pytest.approx(as_run.step.tokens_per_device)
    assert judged.memory == pytest.approx(as_run.memory)


def test_nodes_of_a_cluster_judge_each_dispatch_alike():
    config = mixture()
    some = [next(one for one in tried(config) if one.dispatch.form == form) for form in ("alltoall", "allgather")]
    there = judge_some(
        tree_of(config), [one.tree() for one in some], DEVICE.model_dump(mode="json"), LIMIT, Constraints().tree()
    )
    for one, tree in zip(some, there, strict=True):
        assert tree == judge(config, workload_of(with_dispatch(config, one.dispatch)), one, DEVICE, LIMIT).tree()


def test_a_dispatch_that_a_run_has_is_checked_as_the_run_itself_is():
    config = mixture(**SORTED, moe_token_dispatcher_type="alltoall")
    assert not list(check_experts(config))
    assert evaluate_current(config, DEVICE).candidate.dispatch == Dispatch(grouped=True, sends=True)


def test_the_search_leaves_experts_that_compute_every_place_and_says_that_the_run_computes_the_same():
    config = mixture()
    outcome = found(config)
    assert outcome.recommended.candidate.dispatch.grouped
    assert outcome.recommended.step.seconds < outcome.hand.step.seconds
    tree = outcome.to_dict()
    assert tree["computes_the_same"] is True
    assert tree["dispatch_changes"]["model.model_config.moe_grouped_gemm"] == [False, True]
    assert "both drop the same tokens, if any, so the run computes the same" in str(outcome)


def test_a_search_with_a_demand_for_speed_finds_what_a_search_without_one_finds():
    config = mixture()
    plain = found(config)
    speed = plain.recommended.step.tokens_per_device * 8
    limited = found(config, constraints=Constraints(tokens_per_second=0.999 * speed))
    assert limited.recommended.candidate == plain.recommended.candidate


def test_a_changed_capacity_is_said_to_change_what_is_computed():
    config = mixture(capacity_factor=1.5)
    kept = found(config)
    assert kept.recommended.candidate.dispatch == Dispatch(1.5)
    assert "capacity_factor 1.5 is kept" in str(kept)
    permitted = found(config, constraints=Constraints(dispatch=("alltoall", "allgather")))
    (line,) = describe_changes(config, permitted.config)
    assert "model.model_config.capacity_factor 1.5 -> null" in line
    assert "so the run computes something different from the configuration" in line
    assert permitted.to_dict()["computes_the_same"] is False


def test_a_low_utilisation_is_explained_by_its_causes():
    step = evaluate_current(mixture(seq_length=2048), DEVICE).step
    causes = utilisation_causes(step)
    assert step.utilisation < 0.1
    assert sum(causes.values()) <= 1.0
    assert causes[EMPTY_PLACES] > 0.03
    sorted_step = evaluate_current(mixture(**SORTED), DEVICE).step
    assert EMPTY_PLACES not in utilisation_causes(sorted_step)
    line = next(
        part
        for part in found(mixture(), constraints=Constraints(dispatch=("places",))).parts()
        if "matrix FLOPs" in str(part)
    )
    assert EMPTY_PLACES in str(line)


def test_a_step_with_a_usual_utilisation_needs_no_explanation():
    from mindllm.config import load_config
    from toolkit.benchmark.tune_shipped import SHIPPED

    step = evaluate_current(load_config(SHIPPED / "llama2" / "pretrain_llama2_7b_8p.yaml"), DEVICE).step
    assert utilisation_causes(step) == {}


@pytest.mark.parametrize(
    ("forms", "model", "says"),
    [
        (("gather",), {}, "unknown dispatch of experts .*'gather'.*allgather"),
        (("places",), {"expert_num": 1, "model_type": "llama"}, "the model has no experts; leave it out"),
    ],
)
def test_a_dispatch_that_the_model_cannot_have_is_refused(forms, model, says):
    with pytest.raises(UserError, match=says):
        found(cluster_run(dp=8, model={**MIXTURE, **model}), constraints=Constraints(dispatch=forms))


def test_the_command_takes_the_forms(tmp_path, capsys):
    run = tmp_path / "run.yaml"
    run.write_text(render_config(mixture(capacity_factor=1.5)))
    options = ["--dispatch", "alltoall", "--best", "1", "--seconds", "1", "--json", "--output", str(tmp_path / "out")]
    assert main(["--config", str(run), *options]) == 0
    assert json.loads(capsys.readouterr().out)["best"][0]["strategy"]["dispatch"]["grouped"]
