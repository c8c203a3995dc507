"""Mixtures of experts as values: what keys describe, what is counted, what is refused before anything is compiled."""

from pathlib import Path

import pytest
from small_models import SIZES

from mindllm.architecture.experts import ExpertsSpec
from mindllm.config import ModelConfig, keys_for_layers, load_config
from mindllm.errors import UserError

MIXTRAL = Path(__file__).parents[2] / "configs/mixtral/pretrain_mixtral_8x7b.yaml"
QWEN2 = Path(__file__).parents[2] / "configs/qwen2_moe/pretrain_qwen2_moe_57b.yaml"
EXPERTS = {"expert_num": 4, "num_experts_chosen": 2, "moe_intermediate_size": 16}


def model(**changes):
    return ModelConfig(**{**SIZES, **EXPERTS, **changes})


def has_experts(config):
    return [isinstance(layer.feed_forward, ExpertsSpec) for layer in config.architecture.layers]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [True] * 4),
        ({"first_k_dense_replace": 1}, [False, True, True, True]),
        ({"moe_layer_freq": 2}, [True, False, True, False]),
        ({"moe_layer_freq": [0, 1, 1, 0]}, [False, True, True, False]),
        ({"expert_num": 1, "num_experts_chosen": 1}, [False] * 4),
    ],
)
def test_which_layers_have_experts(changes, expected):
    assert has_experts(model(**changes)) == expected


def test_dense_and_expert_layers_are_kinds_of_their_own_and_a_model_can_be_cut_to_any():
    whole = model(first_k_dense_replace=1)
    assert [kind.name for kind in whole.architecture.specifications()] == ["global", "global experts"]
    kept = [whole.architecture.layers[number] for number in (2, 0)]
    assert list(whole.model_copy(update=keys_for_layers(whole, kept)).architecture.layers) == kept


def test_what_a_token_does_not_meet_is_not_computed():
    one, other = model(), model(expert_num=8)
    assert other.parameter_count() > one.parameter_count()
    router = 6.0 * 4 * 4 * 32  # four rows more, in four layers
    assert other.flops_per_token() == one.flops_per_token() + router
    idle = 4 * 2 * 3 * 16 * 32
    assert one.architecture.active_parameter_count() == one.parameter_count() - idle


@pytest.mark.parametrize(("factor", "capacity"), [(None, 32), (1.0, 16), (1.1, 18), (0.01, 1), (9.0, 32)])
def test_the_capacity_of_an_expert(factor, capacity):
    assert model(capacity_factor=factor).architecture.layers[0].feed_forward.capacity(32) == capacity


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.model_config.num_experts_chosen=9", "there are only 8 experts, expert_num (value 9)"),
        ("model.model_config.capacity_factor=0", "must be greater than 0.0 (value 0)"),
        ("model.model_config.n_group=3", "must divide expert_num 8 (value 3)"),
        ("model.model_config.topk_group=2", "there are only 1 groups, n_group (value 2)"),
        (
            "model.model_config.aux_loss_types=[tokens]",
            "must be 'expert', 'switch', 'global', 'device' or 'communication' (value tokens)",
        ),
        ("model.model_config.aux_loss_types=[device]", "is about groups of experts (value device); write n_group, too"),
        ("model.model_config.aux_loss_factors=[]", "must hold a factor for each of aux_loss_types, 1, not 0"),
        ("model.model_config.moe_layer_freq=[1,0]", "must hold 32 entries, one for each layer (num_layers), not 2"),
        ("model.model_config.first_k_dense_replace=32", "no layer has experts (value 32); write expert_num: 1"),
        ("model.model_config.mlp_has_bias=true", "experts are gated and have no bias (value True)"),
        (
            "model.model_config.use_shared_expert_gating=true",
            "requires moe_shared_expert_intermediate_size (value True)",
        ),
        ("model.model_config.topk_bias_update_rate=0.1", "requires balance_via_topk_bias: true (value 0.1)"),
        ("parallel_config.expert_parallel=3", "must divide expert_num 8 (value 3)"),
        ("parallel_config.expert_model_parallel=2", "must divide model_parallel 1 (value 2)"),
        ("model.model_config.expert_num=1", "the model has no experts (value 8); write 1"),
    ],
)
def test_mistakes_name_the_key(override, words):
    with pytest.raises(UserError) as error:
        load_config(MIXTRAL, [f"--{override}"])
    key = "parallel_config.expert_parallel" if override.endswith("expert_num=1") else override.partition("=")[0]
    assert key in str(error.value)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({}, "capacity_factor: products of sorted tokens have no capacity (value 1.5); write null"),
        (
            {"model.model_config.capacity_factor": "null", "parallel_config.model_parallel": 2},
            "expert_model_parallel: experts of moe_grouped_gemm are whole on their devices (value 2); write 1",
        ),
    ],
)
def test_experts_of_sorted_tokens_take_all_and_are_whole(overrides, words):
    given = [f"--{key}={value}" for key, value in {"model.model_config.moe_grouped_gemm": "true", **overrides}.items()]
    with pytest.raises(UserError) as error:
        load_config(MIXTRAL, given)
    assert words in str(error.value)


SENT = {"model.model_config.moe_token_dispatcher_type": "alltoall"}
GROUPED = {"model.model_config.moe_grouped_gemm": "true", "model.model_config.capacity_factor": "null"}
AHEAD_IN_CHUNKS = {
    "model.model_config.model_type": "deepseek_v3",
    "model.model_config.num_nextn_predict_layers": 1,
    "model.model_config.pp_interleave_num": 2,
    "parallel.pipeline_config.pipeline_interleave": "true",
}
ELSEWHERE = "sends tokens to experts with hidden_act silu only, not gelu_tanh (value alltoall); write allgather"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({}, "sends sorted tokens (value alltoall); write moe_grouped_gemm: true, too, or allgather"),
        (GROUPED | {"model.model_config.hidden_act": "gelu_tanh", "model.model_config.model_type": "null"}, ELSEWHERE),
        (
            GROUPED | {"context.device_target": "CPU"},
            "needs operators of Ascend (value alltoall); write allgather, whose results are the same",
        ),
        (
            GROUPED | AHEAD_IN_CHUNKS,
            "fails to compile in MindSpore 2.10 with multi-token prediction, several chunks and recomputation",
        ),
    ],
)
def test_what_tokens_that_are_sent_need(overrides, words):
    with pytest.raises(UserError) as error:
        load_config(MIXTRAL, [f"--{key}={value}" for key, value in {**SENT, **overrides}.items()])
    assert f"moe_token_dispatcher_type: {words}" in str(error.value)


@pytest.mark.parametrize(("changes", "refused"), [({}, True), ({"parallel_config.expert_parallel": 4}, False)])
def test_sorted_experts_without_replicas_whose_batch_is_taken_in_parts_are_refused(changes, refused):
    """MindSpore's compiler ends with "the var_shape must be equal to []"."""
    stage = {"parallel_config.pipeline_stage": 1, "parallel_config.micro_batch_num": 1, **changes}
    given = {**GROUPED, **stage, "runner_config.gradient_accumulation_steps": 2}
    options = [f"--{key}={value}" for key, value in given.items()]
    if not refused:
        load_config(MIXTRAL, options)
        return
    with pytest.raises(UserError, match="gradient_accumulation_steps: gradients of sorted experts without replicas"):
        load_config(MIXTRAL, options)


def test_nothing_is_sent_where_ranks_do_not_share_experts():
    """Then the key changes nothing, on any device."""
    given = {**SENT, **GROUPED, "context.device_target": "CPU", "parallel_config.expert_parallel": "1"}
    config = load_config(MIXTRAL, [f"--{key}={value}" for key, value in given.items()])
    assert not config.sends_tokens
    assert load_config(MIXTRAL, [f"--{key}={value}" for key, value in {**SENT, **GROUPED}.items()]).sends_tokens


def test_the_last_stage_has_a_layer_with_experts_where_any_has():
    """Or the compiler takes memory until the system ends it."""
    dense_last = f"--model.model_config.moe_layer_freq={[1] * 20 + [0] * 8}"
    with pytest.raises(UserError) as error:
        load_config(QWEN2, [dense_last])
    assert "model.model_config.offset: the last stage has 7 layers without experts" in str(error.value)
    load_config(QWEN2, [dense_last, "--model.model_config.offset=[0,0,-2,2]"])


def test_groups_that_do_not_fill_the_devices_are_told_what_does():
    with pytest.raises(UserError) as error:
        load_config(QWEN2, ["--parallel_config.expert_parallel=16"])
    assert "16 groups of 1 ranks do not fill data_parallel 8 x model_parallel 1 evenly (value 16)" in str(error.value)
    assert "; write 1 or 2 or 4 or 8" in str(error.value)
