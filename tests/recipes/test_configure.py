"""From a network and a number of devices to a run: what a person limits, the reasons, and what happens when memory is refuted."""

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

from mindllm.config import load_config
from mindllm.config.reading.shipped import shipped_configs
from mindllm.errors import CheckFailed, UserError
from mindllm.prove.answers import Answer, Standing
from mindllm.recipes.configure import Request, find_run, prove_found
from mindllm.recipes.network import find_network
from mindllm.strategies.constraints import Constraints
from mindllm.timing.device import read_device

DEVICE = read_device("atlas_800t_a2")
REQUEST = Request(find_network("llama3_2_1b"), DEVICE, 8, memory="14GB")


@pytest.fixture(scope="module")
def found():
    return find_run(REQUEST, "mindllm configure llama3_2_1b --devices 8")


def test_the_yaml_is_the_run_that_the_search_recommends(found, tmp_path):
    found.write(tmp_path / "run.yaml")
    assert load_config(tmp_path / "run.yaml") == found.config == found.strategies.config
    assert found.config.parallel_config.device_num == 8
    text = (tmp_path / "run.yaml").read_text()
    assert text.count("\n") < 25
    assert "base: configs/llama3/pretrain_llama3_2_1b.yaml" in text


def test_every_key_has_a_reason_and_the_second_best_a_cause(found):
    assert all(choice.reason for choice in found.made.choices)
    best, second = list(found.lines())[:2]
    assert found.strategies.recommended_name in best
    assert "% slower (+" in second
    assert f"{found.strategies.best[1].candidate.name}," in second


@pytest.mark.parametrize(
    ("constraints", "holds"),
    [
        (Constraints(most_tensor=1), lambda config: config.parallel_config.model_parallel == 1),
        (Constraints(most_stages=2), lambda config: config.parallel_config.pipeline_stage <= 2),
        (Constraints(recompute_attention=False), lambda config: not any_true(config.recompute_config.recompute)),
    ],
)
def test_a_limit_holds(constraints, holds):
    run = find_run(replace(REQUEST, memory="13GB", constraints=constraints), "c")
    assert holds(run.config)


def any_true(value):
    return any(map(any_true, value)) if isinstance(value, list | tuple) else bool(value)


def test_the_fewest_devices_that_are_fast_enough(found):
    best = found.strategies.recommended.step.tokens_per_device
    wanted = Constraints(tokens_per_second=9 * best)
    more = find_run(replace(REQUEST, devices=16, fewer=True, constraints=wanted), "c")
    assert more.device_count == 16
    with pytest.raises(CheckFailed, match=r"8 devices train at most .* tokens a second, .* are required"):
        find_run(replace(REQUEST, constraints=wanted), "c")


def test_what_does_not_fit_is_said():
    with pytest.raises(CheckFailed, match=r"none of \d+ strategies fits"):
        find_run(replace(REQUEST, devices=1, memory="2GB"), "c")


def test_a_directory_without_a_run_of_its_own_is_given_rates(tmp_path):
    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "vocab_size": 32000,'
        ' "intermediate_size": 5632, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "hidden_act": "silu"}'
    )
    run = find_run(Request(find_network(str(tmp_path)), DEVICE, 8, global_batch=64), "c").config
    assert run.pretrained_model_dir == str(tmp_path)
    assert (run.global_batch_size, run.model.config.seq_length) == (64, 2048)
    assert run.lr_schedule.learning_rate > 0


def test_what_was_asked_for_stays(found):
    run = find_run(replace(REQUEST, overrides=["--lr_schedule.learning_rate=3e-5"], seq_length=2048), "c").config
    assert (run.lr_schedule.learning_rate, run.model.config.seq_length) == (3e-5, 2048)


@pytest.mark.parametrize(
    ("option", "key"),
    [
        ("--parallel_config.model_parallel=8", "parallel_config.model_parallel"),
        ("--parallel_config={data_parallel: 4}", "parallel_config.data_parallel"),
        ("--batch_size=2", "runner_config.batch_size"),
        ("--recompute_config.select_recompute={feed_forward.mul: true}", "recompute_config.select_recompute"),
        ("--model.model_config.moe_token_dispatcher_type=allgather", "model.model_config.moe_token_dispatcher_type"),
        ("--parallel.enable_parallel_optimizer=true", "parallel.enable_parallel_optimizer"),
    ],
)
def test_a_key_that_the_search_decides_is_refused_before_the_search(option, key, monkeypatch):
    def search_begins(*arguments):
        raise AssertionError("the key is refused after the search")

    monkeypatch.setattr("mindllm.recipes.configure.find_strategies", search_begins)
    with pytest.raises(UserError, match=f"{key}.*is set by the search.*--max-tensor-parallel"):
        find_run(replace(REQUEST, overrides=[option]), "c")


MIXTRAL = {
    "model_type": "mixtral", "hidden_size": 1024, "intermediate_size": 2816, "max_position_embeddings": 2048,
    "num_attention_heads": 8, "num_experts_per_tok": 2, "num_hidden_layers": 4, "num_key_value_heads": 8, "num_local_experts": 8,
    "rms_norm_eps": 1e-5, "rope_theta": 1e6, "vocab_size": 32000, "hidden_act": "silu",
}  # fmt: skip
SHIPPED_MIXTURE = """base: {base}
lr_schedule: {{learning_rate: 1.0e-4}}
model:
  model_config:
    {{model_type: mixtral, hidden_size: 1024, intermediate_size: 2816, max_position_embedding: 2048, seq_length: 2048,
    num_heads: 8, n_kv_heads: 8, num_experts_chosen: 2, expert_num: 8, num_layers: 4, rms_norm_eps: 1.0e-5, theta: 1.0e+6,
    vocab_size: 32000, aux_loss_types: [expert], aux_loss_factors: [0.001], capacity_factor: 1.5}}
"""


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """The same mixture as a shipped network, whose run has a capacity, as a directory, and as a person's YAML."""
    place = tmp_path_factory.mktemp("mixture")
    directory = place / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(MIXTRAL))
    base = shipped_configs() / "base" / "pretrain.yaml"
    (place / "run.yaml").write_text(SHIPPED_MIXTURE.format(base=base))
    of_yaml = find_network(str(place / "run.yaml"))
    return {"name": replace(of_yaml, is_file=False), "directory": find_network(str(directory)), "yaml": of_yaml}


def run_of(network, **changes):
    return find_run(Request(network, DEVICE, 8, global_batch=32, seq_length=2048, **changes), "c")


def test_a_mixture_is_the_same_run_by_name_and_by_directory(mixture):
    by_name, by_directory = run_of(mixture["name"]), run_of(mixture["directory"])
    steps = [one.strategies.recommended.step.seconds for one in (by_name, by_directory)]
    assert steps[0] == pytest.approx(steps[1], rel=1e-3)
    for found in (by_name, by_directory):
        model = found.config.model.config
        assert (model.capacity_factor, model.moe_grouped_gemm) == (None, True)
        assert (model.aux_loss_types, model.aux_loss_factors) == (("expert",), (0.001,))
    reasons = {choice.key: choice.reason for choice in by_name.made.choices}
    shown = {str(row[0]): str(row[1]) for row in by_directory.made.table().rows}
    assert shown["model.model_config.aux_loss_types"] == "[expert]"
    assert "the shipped run drops those beyond 1.5" in reasons["model.model_config.capacity_factor"]


def test_a_capacity_that_a_person_writes_stays(mixture):
    of_yaml = run_of(mixture["yaml"])
    asked = run_of(mixture["name"], overrides=["--model.model_config.capacity_factor=1.25"])
    of_places = run_of(mixture["name"], constraints=Constraints(dispatch=("places",)))
    for found, factor in ((of_yaml, 1.5), (asked, 1.25), (of_places, 1.5)):
        model = found.config.model.config
        assert (model.capacity_factor, model.moe_grouped_gemm) == (factor, False)
        assert any(f"capacity_factor {factor} is kept" in str(line) for line in found.lines())


def test_a_demand_for_speed_finds_the_run_that_is_found_without_it(mixture):
    plain = run_of(mixture["directory"])
    speed = 8 * plain.strategies.recommended.step.tokens_per_device
    limited = run_of(mixture["directory"], constraints=Constraints(tokens_per_second=0.99 * speed))
    assert limited.strategies.recommended.candidate == plain.strategies.recommended.candidate
    with pytest.raises(CheckFailed) as refused:
        run_of(mixture["directory"], constraints=Constraints(tokens_per_second=1.05 * speed))
    told = float(re.search(r"at most ([\d,]+) tokens", str(refused.value))[1].replace(",", ""))
    assert told == pytest.approx(speed, rel=0.01)


def test_a_low_utilisation_says_why(mixture):
    slow = run_of(mixture["directory"], constraints=Constraints(dispatch=("places",)))
    assert slow.strategies.recommended.step.utilisation < 0.1
    assert any("experts computing places that no token takes" in str(line) for line in slow.lines())


def test_the_second_best_is_slower_by_the_seconds_that_are_shown(found):
    best, second = list(found.lines())[:2]
    shown = [float(re.search(r"([\d.]+) s per step", line)[1]) for line in (best, second)]
    assert f"{shown[1] / shown[0] - 1:.1%} slower" in second


@pytest.mark.parametrize("name", ["llama3_80b", "nowhere/at/all"])
def test_a_name_that_is_none_is_answered_with_the_nearest(name):
    with pytest.raises(UserError, match="no network of that name is shipped"):
        find_network(name)


def test_refuted_memory_is_found_anew_by_the_dry_run(found):
    smaller, asked = replace(found, device_count=7), []

    def prove(config):
        asked.append(config)
        standing = Standing.REFUTED if len(asked) == 1 else Standing.PROVED
        return SimpleNamespace(answer=lambda question: Answer(question, standing, ""))

    assert prove_found(found, lambda: smaller, prove).device_count == 7
    assert len(asked) == 2
