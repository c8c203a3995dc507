"""Mixtures of experts and latent attention in YAMLs of MindFormers, by the names of both generations."""

import pytest

from mindllm.config import config_json, load_config
from mindllm.config.reading.document import dotted
from mindllm.config.reading.load import read_file
from mindllm.errors import UserError
from mindllm.families import family_of
from mindllm.mindformers.reader import convert
from mindllm.parallel.layer_plan import make_plan
from tests.mindformers.mindformers_files import LEGACY, MCORE, writer

MODEL = "model.model_config"
MIXTRAL = {
    "model.arch.type": "MixtralForCausalLM",
    **{
        f"{MODEL}.{key}": value
        for key, value in {"n_kv_heads": 8, "intermediate_size": 14336, "theta": 1000000.0, "multiple_of": ...}.items()
    },
    "moe_config": {
        "expert_num": 8,
        "capacity_factor": 1.1,
        "aux_loss_factor": 0.05,
        "num_experts_chosen": 2,
        "routing_policy": "TopkRouterV2",
        "enable_sdrop": True,
        "router_dense_type": "float32",
    },
    "parallel_config.expert_parallel": 2,
}
OF_MCORE = {"num_key_value_heads": 4, "hidden_act": "silu", "untie_embeddings_and_output_weights": ...}
QWEN3_MOE = {
    **OF_MCORE,
    "model_type": "qwen3_moe",
    "architectures": "Qwen3MoeForCausalLM",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "max_position_embeddings": 40960,
    "head_dim": 128,
    "tie_word_embeddings": False,
    "qk_layernorm": True,
    "moe_grouped_gemm": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "router_dense_type": "float32",
    "norm_topk_prob": True,
    "moe_router_pre_softmax": True,
    "moe_token_drop_policy": "probs",
    "router_aux_loss_coef": 0.001,
    "moe_aux_loss_coeff": 0.001,
    "moe_router_load_balancing_type": "seq_aux_loss",
}
DEEPSEEK_V3 = {
    **OF_MCORE,
    "model_type": "deepseek_v3",
    "architectures": "DeepseekV3ForCausalLM",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "offset": [0, 1],
    "max_position_embeddings": 163840,
    "num_attention_heads": 128,
    "num_key_value_heads": ...,
    "rope_theta": 10000,
    "multi_latent_attention": True,
    "mla_qkv_concat": True,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "qk_nope_head_dim": 128,
    "qk_layernorm": True,
    "num_nextn_predict_layers": 0,
    "mtp_loss_scaling_factor": 0.3,
    "position_embedding_type": "yarn",
    "scaling_factor": 40,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1,
    "mscale_all_dim": 1,
    "moe_intermediate_size": 2048,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "n_shared_experts": 1,
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_aux_loss_coeff": 0.0001,
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.001,
}


def mcore(keys):
    """Keys of a network of mcore with experts, which fill the tensor-parallel ranks."""
    return {"parallel_config.expert_parallel": 2, **{f"{MODEL}.{key}": value for key, value in keys.items()}}


RUNS = {
    "mixtral": (LEGACY, MIXTRAL, 46702792704),
    "qwen3_moe": (MCORE, mcore(QWEN3_MOE), 30532122624),
    "deepseek_v3": (MCORE, mcore(DEEPSEEK_V3), 671026419200),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_network_is_the_published_model(tmp_path, name):
    tree, changes, parameters = RUNS[name]
    config = load_config(writer(tmp_path)(tree, changes))
    assert config.model.config.parameter_count() == parameters
    assert family_of(config.model.config).name == name


def test_every_legacy_key_is_accounted_for(tmp_path):
    config = load_config(writer(tmp_path)(LEGACY, MIXTRAL))
    model = config.model.config
    assert (model.expert_num, model.num_experts_chosen, model.capacity_factor) == (8, 2, 1.1)
    assert (model.aux_loss_types, model.aux_loss_factors) == (("switch",), (0.05,))
    assert config.parallel_config.expert_parallel == 2
    entries = {dotted(entry.path) for entry in convert(read_file(writer(tmp_path)(LEGACY, MIXTRAL)), ()).entries}
    assert {f"moe_config.{key}" for key in MIXTRAL["moe_config"]} <= entries


def with_grouped_products(name, **sizes):
    """A run of RUNS with products of sorted tokens, as its generation of MindFormers asks for them."""
    tree, changes, _ = RUNS[name]
    changes = {**changes, "use_parallel": True, **{f"parallel_config.{key}": size for key, size in sizes.items()}}
    if name == "mixtral":
        changes["moe_config"] = {**changes["moe_config"], "use_gmm": True}
    return tree, changes


@pytest.mark.parametrize(("tensor", "groups"), [(1, 1), (2, 4)])
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_grouped_products_are_those_of_sorted_tokens_and_experts_are_whole(tmp_path, name, tensor, groups):
    run = writer(tmp_path)(*with_grouped_products(name, model_parallel=tensor, expert_parallel=groups))
    config = load_config(run)
    assert config.model.config.moe_grouped_gemm
    assert config.model.config.capacity_factor is None
    assert config.parallel_config.expert_tensor_parallel == 1


@pytest.mark.parametrize(
    ("name", "groups", "written", "travels"),
    [
        ("mixtral", 2, {}, "alltoall"),
        ("mixtral", 2, {"moe_config.use_allgather_dispatcher": True}, "alltoall"),  # which ``MoEV3`` does not read
        ("qwen3_moe", 2, {}, "alltoall"),
        ("qwen3_moe", 2, {"moe_token_dispatcher_type": "alltoall_deredundency"}, "alltoall"),
        ("qwen3_moe", 1, {"moe_token_dispatcher_type": "alltoall"}, "allgather"),  # nothing travels
    ],
)
def test_sorted_tokens_are_sent_as_they_are_there(tmp_path, name, groups, written, travels):
    tree, changes = with_grouped_products(name, model_parallel=1, expert_parallel=groups)
    changes |= {key if "." in key else f"model.model_config.{key}": value for key, value in written.items()}
    if name == "mixtral":
        changes = {key: value for key, value in changes.items() if not key.startswith("moe_config.")} | {
            "moe_config": changes["moe_config"] | {key.partition(".")[2]: value for key, value in written.items()}
        }
    assert load_config(writer(tmp_path)(tree, changes)).model.config.moe_token_dispatcher_type == travels


@pytest.mark.parametrize(("chunks", "travels"), [(1, "alltoall"), (2, "allgather")])
def test_what_does_not_compile_in_chunks_is_gathered(tmp_path, chunks, travels):
    changes = {**mcore(DEEPSEEK_V3), "parallel_config.expert_parallel": 2, "model.model_config.moe_grouped_gemm": True}
    changes |= {"parallel_config.expert_model_parallel": 1, "model.model_config.pp_interleave_num": chunks}
    changes |= {"parallel_config.model_parallel": 1, "parallel.pipeline_config.pipeline_interleave": chunks > 1}
    offset = [[0, 0], [0, 1]] if chunks > 1 else [0, 1]
    changes |= {"model.model_config.num_nextn_predict_layers": 1, "model.model_config.offset": offset}
    model = load_config(writer(tmp_path)(MCORE, changes)).model.config
    assert (model.num_nextn_predict_layers, model.moe_token_dispatcher_type) == (1, travels)


def test_another_way_to_send_tokens_is_refused(tmp_path):
    tree, changes = with_grouped_products("qwen3_moe", model_parallel=1, expert_parallel=2)
    changes["model.model_config.moe_token_dispatcher_type"] = "flex"
    with pytest.raises(UserError, match="tokens are sent by alltoall, alltoall_deredundency, alltoall_zero_redundancy"):
        load_config(writer(tmp_path)(tree, changes))


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        (
            {"expert_parallel": 1},
            "groups of experts fill the tensor-parallel ranks here; write --parallel_config.expert",
        ),
        ({"expert_parallel": 2, "expert_model_parallel": 2}, "write --parallel_config.expert_model_parallel=1"),
    ],
)
def test_grouped_products_of_experts_in_parts_are_refused(tmp_path, name, sizes, told):
    with pytest.raises(UserError, match=told):
        load_config(writer(tmp_path)(*with_grouped_products(name, model_parallel=2, **sizes)))


def test_what_a_refusal_of_grouped_products_says_to_write_is_taken(tmp_path):
    """Also where the YAML does not have the key: it decides how another one is translated."""
    run = writer(tmp_path)(*with_grouped_products("qwen3_moe", model_parallel=2, expert_parallel=...))
    with pytest.raises(UserError, match=r"write --parallel_config\.expert_parallel=2"):
        load_config(run)
    config = load_config(run, ["--parallel_config.expert_parallel=2"])
    assert config.model.config.moe_grouped_gemm
    assert (config.parallel_config.expert_parallel, config.parallel_config.expert_tensor_parallel) == (2, 1)


def test_how_experts_of_mcore_are_chosen_and_balanced(tmp_path):
    model = load_config(writer(tmp_path)(MCORE, mcore(DEEPSEEK_V3))).model.config
    assert (model.use_gating_sigmoid, model.n_group, model.topk_group, model.routed_scaling_factor) == (True, 8, 4, 2.5)
    assert (model.balance_via_topk_bias, model.topk_bias_update_rate) == (True, 0.001)
    assert (model.aux_loss_types, model.aux_loss_factors) == (("expert",), (0.0001,))
    assert model.moe_shared_expert_intermediate_size == 2048
    scaling = model.rope_scaling
    assert (scaling.type, scaling.factor, scaling.original_max_position_embeddings) == ("yarn", 40, 4096)
    later = load_config(
        writer(tmp_path)(MCORE, mcore({**QWEN3_MOE, "moe_router_pre_softmax": False, "norm_topk_prob": ...}))
    )
    assert later.model.config.norm_topk_prob
    sigmoid = {**DEEPSEEK_V3, "moe_router_pre_softmax": False, "norm_topk_prob": False}
    assert not load_config(writer(tmp_path)(MCORE, mcore(sigmoid))).model.config.norm_topk_prob


@pytest.mark.parametrize("word", ["gbs_aux_loss", "global_aux_loss"])
def test_experts_balanced_over_a_global_batch_are_and_what_differs_is_told(tmp_path, word):
    path = writer(tmp_path)(MCORE, mcore({**QWEN3_MOE, "moe_router_load_balancing_type": word}))
    model = load_config(path).model.config
    assert (model.aux_loss_types, model.aux_loss_factors) == (("global",), (0.001,))
    told = {dotted(entry.path): entry.reason for entry in convert(read_file(path), ()).entries}
    assert told[f"{MODEL}.moe_router_load_balancing_type"].startswith("choices are those of the global batch before")


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({**QWEN3_MOE, "moe_router_load_balancing_type": "sinkhorn"}, "seq_aux_loss, aux_loss, gbs_aux_loss"),
        ({**QWEN3_MOE, "num_moe_experts": 64}, "contradicts"),
        ({**QWEN3_MOE, "moe_router_dtype": "bfloat16"}, "computes in float32"),
        ({**QWEN3_MOE, "moe_router_score_function": "sqrtsoftplus"}, "sigmoid or softmax"),
        ({**QWEN3_MOE, "n_group": 4, "topk_group": 2}, "no qwen3_moe model has n_group 4"),
        ({**QWEN3_MOE, "num_nextn_predict_layers": 1}, "no qwen3_moe model has num_nextn_predict_layers 1"),
        ({**DEEPSEEK_V3, "num_nextn_predict_layers": 1, "mtp_num_layers": 2}, "contradicts"),
        ({**DEEPSEEK_V3, "scaling_factor": ...}, "yarn needs"),
    ],
)
def test_what_would_change_the_result_is_refused(tmp_path, keys, words):
    with pytest.raises(UserError) as caught:
        load_config(writer(tmp_path)(MCORE, mcore(keys)))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "factor"), [({}, 0.3), ({"mtp_loss_scaling_factor": ...}, 0.1), ({"mtp_loss_factor": 0.3}, 0.3)]
)
def test_layers_that_predict_ahead_are_counted_by_offset_and_recomputed_as_there(tmp_path, keys, factor):
    ahead = {**DEEPSEEK_V3, "num_nextn_predict_layers": 1, "offset": 0, **keys}
    config = load_config(writer(tmp_path)(MCORE, mcore(ahead)))
    model = config.model.config
    assert (model.num_layers, model.num_nextn_predict_layers, model.mtp_loss_factor) == (61, 1, factor)
    assert [sum(layer.stage == stage for layer in make_plan(config).layers) for stage in (0, 1)] == [31, 31]


def test_without_experts_their_keys_change_nothing(tmp_path):
    section = {"expert_num": 1, "capacity_factor": 1.05, "num_experts_chosen": 1, "aux_loss_types": ["expert"]}
    config = load_config(writer(tmp_path)(LEGACY, {"moe_config": section}))
    assert config.model.config == load_config(writer(tmp_path)(LEGACY)).model.config


def test_a_factor_that_files_cannot_say_is_trained_with_and_not_written(tmp_path):
    changes = mcore({**QWEN3_MOE, "routed_scaling_factor": 1.5})
    model = load_config(writer(tmp_path)(MCORE, changes)).model.config
    assert model.architecture.layers[0].feed_forward.router.scale == 1.5
    with pytest.raises(UserError, match="files of qwen3_moe cannot say routed_scaling_factor"):
        config_json(model, "bfloat16", {})


def test_what_the_class_of_a_network_has_where_a_yaml_says_nothing(tmp_path):
    left_out = dict.fromkeys(
        ("num_attention_heads", "kv_lora_rank", "norm_topk_prob", "scoring_func", "rms_norm_eps"), ...
    )
    path = writer(tmp_path)(MCORE, mcore({**DEEPSEEK_V3, **left_out}))
    model = load_config(path).model.config
    assert (model.num_heads, model.kv_lora_rank, model.rms_norm_eps) == (128, 512, 1e-6)
    assert model.use_gating_sigmoid
    assert model.norm_topk_prob
    told = {entry.key: entry for entry in convert(read_file(path)).entries}
    assert told[f"{MODEL}.num_attention_heads"].reason.startswith("left out")
    assert told[f"{MODEL}.num_attention_heads"].origin is None


@pytest.mark.parametrize(
    ("chunks", "offset", "placed"), [(1, [-1, 2], ((29, 33),)), (2, [[1, 0], [0, 0]], ((16, 15), (15, 16)))]
)
def test_offsets_that_leave_out_layers_ahead_have_them_on_the_last_stage(tmp_path, chunks, offset, placed):
    """61 layers and one ahead: the newer names place the 61 alone, then the last stage has one more."""
    ahead = {**DEEPSEEK_V3, "num_nextn_predict_layers": 1, "offset": offset, "pp_interleave_num": chunks}
    changes = {**mcore(ahead), "parallel": {"pipeline_config": {"pipeline_interleave": chunks > 1}}}
    assert make_plan(load_config(writer(tmp_path)(MCORE, changes))).counts == placed


def test_groups_that_experts_cannot_form_are_left_out_with_a_warning(tmp_path, caplog):
    path = writer(tmp_path)(MCORE, mcore({**DEEPSEEK_V3, "n_routed_experts": 4, "num_experts_per_tok": 2}))
    model = load_config(path).model.config
    assert (model.expert_num, model.n_group, model.topk_group) == (4, 1, 1)
    assert "2 of 4 experts cannot be chosen from 4 of 8 groups" in caplog.text


@pytest.mark.parametrize(("method", "groups"), [(..., 1), ("greedy", 1), ("group_limited_greedy", 4)])
def test_legacy_groups_count_where_the_method_uses_them(tmp_path, method, groups):
    moe = {f"moe_config.{key}": value for key, value in {"n_group": 4, "topk_group": 2, "topk_method": method}.items()}
    entries = convert(read_file(writer(tmp_path)(LEGACY, {**MIXTRAL, **moe})), ())
    assert entries.document.data["model"]["model_config"].get("n_group", 1) == groups
