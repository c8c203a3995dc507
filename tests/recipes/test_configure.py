"""From a network and a number of devices to a run: what a person limits, the reasons, and what happens when memory is refuted."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from mindllm.config import load_config
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
    best, second = found.lines()
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
    with pytest.raises(CheckFailed, match=r"8 devices train at most .* tokens a second, .* were wanted"):
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


def test_a_key_that_the_search_decides_is_refused():
    with pytest.raises(
        UserError, match=r"parallel_config.model_parallel.*the search decides this.*--max-tensor-parallel"
    ):
        find_run(replace(REQUEST, overrides=["--parallel_config.model_parallel=8"]), "c")


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
