"""Weights in half precision and gradients in the formula of memory, beside MindSpore's dry runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from small_cluster import cluster_run

from mindllm.architecture.optimizer_state import ADAMW, MUON
from mindllm.compiled.simulation.simulate_rank import simulate_rank
from mindllm.parallel.layout import mesh_of
from mindllm.planning.costs.formula import KINDS, plan_problem, run_plan
from mindllm.planning.plan import evaluate
from mindllm.timing.configured import workload_of
from mindllm.timing.device import DEFAULT, read_device
from mindllm.timing.memory import stage_bytes, state_bytes, update_working_bytes
from mindllm.timing.non_layer_cost import EXPERTS, layer_parameters
from mindllm.timing.saved_activations import kept_results
from mindllm.timing.step_work import step_work
from mindllm.timing.weight_memory import (
    gradients_of_update,
    gradients_of_weights,
    kept_of_weights,
    more_at_update,
    weights_and_gradients,
    zeros_of_accumulators,
)
from mindllm.units import MIB
from tests.compiled.simulations import needs_compiler

DEVICE = read_device(DEFAULT)
SHARED: dict[str, Any] = {"parallel": {"enable_parallel_optimizer": True}}
AGAIN = {"recompute_config": {"recompute": True}}
WIDE = {
    "hidden_size": 1024, "num_heads": 8, "n_kv_heads": 8, "intermediate_size": 2816, "num_layers": 4, "seq_length": 64,
    "vocab_size": 512,
}  # fmt: skip
HIGH = {
    "hidden_size": 1280, "num_heads": 10, "n_kv_heads": 10, "intermediate_size": 3584, "num_layers": 3, "seq_length": 128,
    "vocab_size": 1024,
}  # fmt: skip
DEEP = {
    "hidden_size": 768, "num_heads": 12, "n_kv_heads": 12, "intermediate_size": 3072, "num_layers": 6, "seq_length": 256,
    "vocab_size": 2048,
}  # fmt: skip
MIXTURE = {
    **WIDE, "num_layers": 2, "model_type": "mixtral", "expert_num": 8, "num_experts_chosen": 2, "intermediate_size": 1024,
    "capacity_factor": 1.0,
}  # fmt: skip
SORTED = {"capacity_factor": None, "moe_grouped_gemm": True, "moe_token_dispatcher_type": "alltoall"}
QWEN = {
    **HIGH, "hidden_size": 640, "model_type": "qwen2_moe", "qkv_has_bias": True, "expert_num": 16, "num_experts_chosen": 4,
    "norm_topk_prob": False, "moe_intermediate_size": 896, "moe_shared_expert_intermediate_size": 1792,
    "use_shared_expert_gating": True, "num_layers": 4,
}  # fmt: skip
SENT = {**QWEN, "moe_grouped_gemm": True, "moe_token_dispatcher_type": "alltoall"}
CAPPED = {**QWEN, "capacity_factor": 1.25, "seq_length": 512}
LATENT = {
    "model_type": "deepseek_v3", "vocab_size": 4096, "hidden_size": 1024, "num_layers": 6, "num_nextn_predict_layers": 1,
    "mtp_loss_factor": 0.3, "num_heads": 16, "n_kv_heads": 16, "q_lora_rank": 224, "kv_lora_rank": 64, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "intermediate_size": 2688, "seq_length": 512, "expert_num": 16,
    "num_experts_chosen": 4, "moe_intermediate_size": 288, "moe_shared_expert_intermediate_size": 288, "first_k_dense_replace": 2,
    "use_gating_sigmoid": True, "balance_via_topk_bias": True, "topk_bias_update_rate": 0.001, "routed_scaling_factor": 2.5,
    "n_group": 4, "topk_group": 2, "aux_loss_types": ["expert"], "aux_loss_factors": [1e-4], "capacity_factor": 1.5,
    "compute_dtype": "bfloat16", "offset": [1, 0],
}  # fmt: skip
NARROW = {**LATENT, "hidden_size": 768, "num_heads": 8, "n_kv_heads": 8, "seq_length": 1024}
AHEAD = ("num_nextn_predict_layers", "mtp_loss_factor", "offset")
GEMMA = {
    "model_type": "gemma2", "vocab_size": 8192, "hidden_size": 512, "num_layers": 4, "num_heads": 8, "n_kv_heads": 4,
    "head_dim": 64, "intermediate_size": 2048, "seq_length": 1024, "loss_chunks": 4, "layernorm_zero_centered_gamma": True,
    "hidden_act": "gelu_tanh", "scale_embeddings": True, "tie_word_embeddings": True, "sandwich_norm": True,
    "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "sliding_window": 512, "sliding_window_pattern": 2,
    "query_pre_attn_scalar": 64, "compute_dtype": "bfloat16",
}  # fmt: skip
DROPS = {"attention_dropout": 0.1, "hidden_dropout": 0.1, "use_flash_attention": False}
HALF = {"compute_dtype": "float16", "softmax_compute_type": "float16"}
SINGLE = {"runner_config": {"batch_size": 1}}
IN_PARTS: dict[str, Any] = {"parallel": {"enable_parallel_optimizer": True, "parallel_optimizer_config": {
    "gradient_accumulation_shard": True, "parallel_optimizer_threshold": 0}}}  # fmt: skip
ALL_PROJECTIONS = ".*wq|.*wk|.*wv|.*wo|.*w1|.*w2|.*w3"


def adapted(model, targets=ALL_PROJECTIONS, **keys):
    """A model whose projections are frozen but for adapters beside them."""
    pet = {"pet_type": "lora", "lora_rank": 8, "lora_alpha": 16, "target_modules": targets, **keys}
    return {**model, "pet_config": pet}


def accumulated(times):
    return {"runner_config": {"gradient_accumulation_steps": times}}


HALF_PARAMETERS = {"compute_dtype": "bfloat16", "param_init_type": "bfloat16"}
WITHIN = 0.025
RUNS: dict[str, tuple[dict[str, Any], str, int, float]] = {
    # What the model was found from.
    "four replicas": ({"model": WIDE, "dp": 4, **SHARED}, ADAMW, 0, 306.3),
    "Muon of four replicas": ({"model": WIDE, "dp": 4, **SHARED}, MUON, 0, 257.2),
    "four replicas of one state each": ({"model": WIDE, "dp": 4}, ADAMW, 0, 829.7),
    "accumulated": (
        {"model": WIDE, "dp": 4, **SHARED, "runner_config": {"gradient_accumulation_steps": 2}}, MUON, 0, 434.4,
    ),
    "stages without optimizer parallel": ({"model": WIDE, "dp": 2, "pp": 2, "micro": 2}, ADAMW, 0, 539.1),
    "replicas that share experts": (
        {"model": MIXTURE, "dp": 4, "tp": 2, "expert_parallel": 2, "use_seq_parallel": True, **SHARED}, MUON, 0, 136.2,
    ),
    "sent tokens, all micro-batches at once": (
        {"model": {**MIXTURE, **SORTED}, "dp": 4, "expert_parallel": 2, "pp": 2, "micro": 2, **SHARED}, ADAMW, 0, 253.8,
    ),
    "sent tokens on the last stage": (
        {"model": {**MIXTURE, **SORTED}, "dp": 4, "expert_parallel": 2, "pp": 2, "micro": 2, **SHARED}, ADAMW, 1, 245.0,
    ),
    "pairs of replicas that share a state": (
        {"model": DEEP, "dp": 8, "parallel": {"enable_parallel_optimizer": True, "parallel_optimizer_config": {
            "optimizer_weight_shard_size": 2, "parallel_optimizer_threshold": 0}}}, MUON, 0, 699.0,
    ),
    "gathered tokens": (
        {"model": {**SENT, "moe_token_dispatcher_type": "allgather"}, "dp": 4, "expert_parallel": 2, **SHARED}, ADAMW, 0, 683.4,
    ),
    "eight micro-batches over four stages": (
        {"model": {**DEEP, "num_layers": 8}, "dp": 2, "tp": 2, "pp": 4, "micro": 8}, ADAMW, 0, 367.0,
    ),
    "these layers computed again": (
        {"model": {**DEEP, "num_layers": 8}, "dp": 2, "tp": 2, "pp": 4, "micro": 8, **AGAIN}, MUON, 1, 154.9,
    ),
    "accumulators in parts": ({"model": WIDE, "dp": 4, "pp": 2, "micro": 4, **IN_PARTS}, ADAMW, 0, 296.1),
    "accumulators in parts beside exchanges": (
        {"model": DEEP, "dp": 2, "tp": 2, "pp": 2, "micro": 4, **IN_PARTS, **AGAIN}, ADAMW, 0, 190.9,
    ),
    "accumulators in parts of experts": (
        {"model": MIXTURE, "dp": 4, "expert_parallel": 2, "pp": 2, "micro": 4, **IN_PARTS}, ADAMW, 0, 258.7,
    ),
    "one device accumulates": ({"model": WIDE, **accumulated(2)}, ADAMW, 0, 1037.2),
    "one device accumulates those of experts": ({"model": MIXTURE, **accumulated(2)}, ADAMW, 0, 1208.7),
    "adapters on four replicas": ({"model": adapted(WIDE), "dp": 4, **SHARED}, ADAMW, 0, 323.7),
    "adapters of layers that are computed again": (
        {"model": adapted(WIDE), "dp": 2, "tp": 2, "use_seq_parallel": True, **SHARED, **AGAIN}, ADAMW, 0, 158.8,
    ),
    "adapters of a stage with one such layer": (
        {"model": adapted(WIDE), "dp": 2, "pp": 2, "micro": 4, "recompute_config": {"recompute": [1, 1]}}, ADAMW, 0, 180.3,
    ),
    "latent attention": (
        {"model": LATENT, "dp": 8, "expert_parallel": 4, "pp": 2, "micro": 4, **SHARED, **SINGLE}, ADAMW, 0, 691.1,
    ),
    "latent attention computed again": (
        {"model": LATENT, "dp": 8, "expert_parallel": 4, "pp": 2, "micro": 4, **SHARED, **AGAIN, **SINGLE}, ADAMW, 0, 436.4,
    ),
    "capped scores": (
        {"model": GEMMA, "dp": 2, "tp": 2, "pp": 2, "micro": 4, "use_seq_parallel": True, **SHARED, **AGAIN, **SINGLE},
        ADAMW, 0, 168.5,
    ),
    "a tied head on the last stage": (
        {"model": GEMMA, "dp": 2, "tp": 2, "pp": 2, "micro": 4, "use_seq_parallel": True, **SHARED, **AGAIN, **SINGLE},
        ADAMW, 1, 158.4,
    ),
    "experts computed again": (
        {"model": CAPPED, "dp": 4, "tp": 2, "expert_parallel": 4, "pp": 2, "micro": 4, "use_seq_parallel": True, **SHARED,
         **AGAIN}, ADAMW, 0, 267.6,
    ),
    # What it was not found from.
    "sixteen replicas": ({"model": HIGH, "dp": 16, **SHARED}, MUON, 0, 235.2),
    "width of experts over two ranks": (
        {"model": {**QWEN, "capacity_factor": 1.25}, "dp": 4, "tp": 2, "expert_parallel": 4, "use_seq_parallel": True,
         **SHARED}, MUON, 0, 239.6,
    ),
    "sent tokens of six micro-batches": (
        {"model": SENT, "dp": 4, "expert_parallel": 4, "pp": 2, "micro": 6, **SHARED}, ADAMW, 0, 465.0,
    ),
    "Muon of these on the last stage": (
        {"model": SENT, "dp": 4, "expert_parallel": 4, "pp": 2, "micro": 6, **SHARED}, MUON, 1, 339.2,
    ),
    "sent tokens over four stages": (
        {"model": {**SENT, "num_layers": 8}, "dp": 8, "expert_parallel": 8, "pp": 4, "micro": 8, **SHARED}, MUON, 0, 371.0,
    ),
    "experts over stages without optimizer parallel": (
        {"model": {**QWEN, "capacity_factor": 1.0}, "dp": 4, "expert_parallel": 2, "pp": 2, "micro": 3}, ADAMW, 0, 844.6,
    ),
    "selected operators": (
        {"model": {**HIGH, "num_layers": 6, "num_heads": 20, "n_kv_heads": 20}, "tp": 4, "pp": 2, "micro": 4,
         "use_seq_parallel": True, "recompute_config": {"select_recompute": True}}, ADAMW, 0, 347.1,
    ),
    "layers computed again": ({"model": DEEP, "dp": 4, **SHARED, **AGAIN}, ADAMW, 0, 328.1),
    "composed attention": (
        {"model": {**DEEP, "num_layers": 4, "use_flash_attention": False}, "tp": 2, "pp": 2, "micro": 4}, MUON, 1, 183.5,
    ),
    "dropout of composed attention": (
        {"model": {**DEEP, **DROPS, "num_layers": 4}, "tp": 2, "pp": 2, "micro": 4}, ADAMW, 0, 276.4,
    ),
    "a softmax in half precision": (
        {"model": {**DEEP, **HALF, "num_layers": 4, "use_flash_attention": False}, "tp": 2, "pp": 2, "micro": 4}, ADAMW, 0, 264.3,
    ),
    "dropout behind it computed again": (
        {"model": {**HIGH, **HALF, **DROPS, "seq_length": 1024}, "tp": 2, "dp": 2, "use_seq_parallel": True, **SHARED, **AGAIN,
         **SINGLE}, ADAMW, 0, 335.1,
    ),
    "accumulators in parts of layers computed again": (
        {"model": {**HIGH, "num_layers": 6}, "dp": 2, "pp": 2, "micro": 4, **IN_PARTS,
         "recompute_config": {"recompute": [3, 0]}}, ADAMW, 0, 960.4,
    ),
    "these by Muon on the last stage": (
        {"model": {**HIGH, "num_layers": 6}, "dp": 2, "pp": 2, "micro": 4, **IN_PARTS}, MUON, 1, 842.6,
    ),
    "one device accumulates four times": ({"model": HIGH, **accumulated(4)}, MUON, 0, 1040.1),
    "one device accumulates those of shared experts": (
        {"model": {**QWEN, "capacity_factor": 1.0}, **accumulated(2)}, ADAMW, 0, 2638.1,
    ),
    "adapters on the last stage": (
        {"model": adapted({**HIGH, "num_layers": 8}), "dp": 2, "pp": 2, "micro": 4, **SHARED}, ADAMW, 1, 551.8,
    ),
    "adapters of six layers a stage": (
        {"model": adapted({**DEEP, "num_layers": 12}, lora_rank=16), "dp": 2, "tp": 2, "pp": 2, "micro": 6,
         "use_seq_parallel": True}, ADAMW, 0, 389.3,
    ),
    "adapters of weights in half precision": (
        {"model": adapted({**HIGH, "num_layers": 4}, frozen_dtype="float16"), "tp": 2, "pp": 2, "micro": 2, **SHARED},
        ADAMW, 1, 73.9,
    ),
    "adapters of queries and values": (
        {"model": adapted({**DEEP, "num_layers": 8}, ".*wq|.*wv"), "dp": 2, "pp": 2, "micro": 4, **SHARED}, ADAMW, 1, 316.7,
    ),
    "narrow latent attention": (
        {"model": NARROW, "dp": 4, "expert_parallel": 4, "pp": 2, "micro": 4, **SHARED, **AGAIN, **SINGLE}, ADAMW, 0, 413.8,
    ),
    "latent attention, a layer of each kind computed again": (
        {"model": {key: value for key, value in NARROW.items() if key not in AHEAD}, "dp": 8, "expert_parallel": 4, "pp": 2,
         "micro": 4, **SHARED, "recompute_config": {"recompute": [2, 0]}, **SINGLE}, ADAMW, 0, 358.7,
    ),
    "capped scores of four tensor-parallel ranks": (
        {"model": {**GEMMA, "num_layers": 6, "seq_length": 768, "hidden_size": 768, "vocab_size": 16384}, "tp": 4, "pp": 2,
         "micro": 4, "use_seq_parallel": True, **SINGLE}, ADAMW, 0, 401.9,
    ),
    "Muon of experts computed again": (
        {"model": {**CAPPED, "seq_length": 256}, "dp": 8, "expert_parallel": 8, "pp": 2, "micro": 4, **SHARED, **AGAIN},
        MUON, 1, 251.8,
    ),
    # Parameters in half precision.
    "four replicas of parameters in half precision": ({"model": {**WIDE, **HALF_PARAMETERS}, "dp": 4}, ADAMW, 0, 644.9),
    "these with a shared state": ({"model": {**WIDE, **HALF_PARAMETERS}, "dp": 4, **SHARED}, ADAMW, 0, 258.0),
    "these accumulated": (
        {"model": {**WIDE, **HALF_PARAMETERS}, "dp": 4, **SHARED, **accumulated(2)}, ADAMW, 0, 357.4,
    ),
    "stages of parameters in half precision": (
        {"model": {**WIDE, **HALF_PARAMETERS}, "dp": 2, "pp": 2, "micro": 2}, ADAMW, 0, 414.4,
    ),
    "these stages with a shared state": (
        {"model": {**WIDE, **HALF_PARAMETERS}, "dp": 2, "pp": 2, "micro": 2, **SHARED}, ADAMW, 0, 265.1,
    ),
    "their accumulators in parts": (
        {"model": {**WIDE, **HALF_PARAMETERS}, "dp": 4, "pp": 2, "micro": 4, **IN_PARTS}, ADAMW, 0, 208.1,
    ),
    "tensor-parallel ranks of them computed again": (
        {"model": {**DEEP, **HALF_PARAMETERS, "num_layers": 8}, "dp": 2, "tp": 2, "pp": 2, "micro": 4,
         "use_seq_parallel": True, **SHARED, **AGAIN}, ADAMW, 0, 198.5,
    ),
    "a rank of a state alone reads them as they are": (
        {"model": {**DEEP, **HALF_PARAMETERS, "num_layers": 8}, "tp": 2, "pp": 2, "micro": 4, "use_seq_parallel": True,
         **SHARED}, ADAMW, 0, 335.2,
    ),
    "these computed again": (
        {"model": {**DEEP, **HALF_PARAMETERS, "num_layers": 8}, "tp": 2, "pp": 2, "micro": 4, "use_seq_parallel": True,
         **SHARED, **AGAIN}, ADAMW, 0, 285.3,
    ),
    "parameters in another type than products": (
        {"model": {**WIDE, **HALF_PARAMETERS, "param_init_type": "float16"}, "dp": 4, **SHARED}, ADAMW, 0, 261.8,
    ),
    "tensor-parallel replicas of parameters in half precision": (
        {"model": {**WIDE, **HALF_PARAMETERS}, "tp": 2, "dp": 2}, ADAMW, 0, 327.1,
    ),
    "Muon of parameters in half precision": (
        {"model": {**WIDE, **HALF_PARAMETERS}, "dp": 2, "tp": 2, **SHARED}, MUON, 0, 150.0,
    ),
    "one device accumulates in half precision": (
        {"model": {**HIGH, **HALF_PARAMETERS}, **accumulated(4)}, ADAMW, 0, 878.2,
    ),
    "sent tokens to experts in half precision": (
        {"model": {**MIXTURE, **SORTED, **HALF_PARAMETERS}, "dp": 4, "expert_parallel": 2, "pp": 2, "micro": 2, **SHARED},
        ADAMW, 0, 206.5,
    ),
}  # fmt: skip
"""Keys of a run, its optimizer, a stage, and MB that MindSpore's dry run of it uses."""
SIMULATED = (
    "Muon of four replicas", "sent tokens on the last stage", "selected operators", "one device accumulates",
    "accumulators in parts", "adapters of weights in half precision", "a tied head on the last stage",
    "dropout behind it computed again", "these stages with a shared state",
)  # fmt: skip


def run_of(name):
    keys, optimizer, *_ = RUNS[name]
    return cluster_run(**keys, optimizer={"type": optimizer})


@pytest.mark.parametrize("name", RUNS)
def test_the_formula_is_that_near_to_dry_runs(name):
    stage, found = RUNS[name][2:]
    assert stage_bytes(workload_of(run_of(name)))[stage] / MIB == pytest.approx(found, rel=WITHIN)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("name", SIMULATED)
def test_dry_runs_say_so(name):
    config, (stage, found) = run_of(name), RUNS[name][2:]
    rank = stage * mesh_of(config).stage_device_num
    assert simulate_rank(config, rank).used_peak / MIB == pytest.approx(found, abs=1)


@pytest.mark.parametrize("optimizer", [ADAMW, MUON])
@pytest.mark.parametrize("keys", [{"dp": 4, **SHARED}, {"dp": 2}, {"tp": 2}], ids=["shared", "whole", "no replicas"])
def test_the_planner_and_the_formula_say_the_same(keys, optimizer):
    config = cluster_run(model=WIDE, pp=2, micro=4, optimizer={"type": optimizer}, **keys)
    workload = workload_of(config)
    problem = plan_problem(workload, DEVICE, 1 << 40, "run")
    found = evaluate(problem, run_plan(config, dict(KINDS))).peak_mb
    expected = [size / MIB for size in stage_bytes(workload)]
    assert found.tolist() == pytest.approx(expected)


def test_at_the_update_weights_in_half_precision_are_gone_and_gradients_are_parts():
    run = workload_of(cluster_run(model=WIDE, dp=4, pp=2, micro=2, **SHARED))
    held = step_work(run).updates[0].parameters
    table = 512 * 1024
    assert gradients_of_update(held, run) == 4 * held.trained / 4
    assert (
        more_at_update(held, run) == 4 * held.trained / 4 - 2 * (held.trained - table) - 4 * table
    )  # gathered as it is
    whole = workload_of(cluster_run(model=WIDE, dp=4, pp=2, micro=2))
    assert gradients_of_update(step_work(whole).updates[0].parameters, whole) == 0.0  # accumulators are its gradients


def test_every_pass_casts_matrices_without_optimizer_parallel_and_transposes_those_of_grouped_products():
    layer = 4 * 1024 * 1024 + 3 * 1024 * 2816
    for keys, kept in (({"dp": 2}, 2 * layer), ({"dp": 2, **SHARED}, 0), ({"tp": 2}, layer)):
        run = workload_of(cluster_run(model=WIDE, pp=2, micro=2, **keys))
        assert kept_of_weights(run, run.architecture.layers[0]) == kept
    model, experts = {**MIXTURE, **SORTED}, 4 * 3 * 1024 * 1024
    for keys, kept in (({}, experts + 4 * 1024 * 1024), (SHARED, experts)):
        run = workload_of(cluster_run(model=model, dp=4, expert_parallel=2, pp=2, micro=2, **keys))
        assert kept_of_weights(run, run.architecture.layers[0]) == 2 * kept
        spec = run.architecture.layers[0]
        inner = kept_results(spec, run.rank_tokens, run.seq_length, run.strategy, run.numerics)[f"{EXPERTS}mul"]
        # of the joined projections twice, when the other one, and what is behind the joined ones, are gone
        assert gradients_of_weights(run, spec) == 2 * 2 * (2 * experts / 3) - 2 * experts / 3 - inner


def test_of_capacitys_experts_a_gradient_is_there_for_every_sequence_and_once_more():
    run = workload_of(cluster_run(model=MIXTURE, dp=4, expert_parallel=2, pp=2, micro=2, **SHARED))
    sequences, one = 2 * 2, 4 * 1024 * 1024
    assert gradients_of_weights(run, run.architecture.layers[0]) == 2 * one * (sequences + 1)
    assert update_working_bytes(run) == 0.0


def test_frozen_weights_are_cast_by_every_pass_and_trained_ones_once():
    layer = 4 * 1024 * 1024 + 3 * 1024 * 2816
    in_half = {"frozen_dtype": "float16"}
    for keys, model, kept, state in (
        ({"pp": 2, "micro": 2}, {}, 2 * layer, 4 * layer),
        ({"pp": 2, "micro": 2}, in_half, 0, 2 * layer),  # read as they are
        ({}, in_half, 0, 2 * layer),
    ):
        run = workload_of(cluster_run(model=adapted(WIDE, **model), dp=2, **SHARED, **keys))
        spec, held = run.architecture.layers[0], step_work(run).updates[0].parameters
        adapters = layer_parameters(spec, run.strategy, run.architecture.pet)
        passes = kept_of_weights(run, spec) - (adapters.made - gradients_of_update(adapters, run)) * (
            not run.accumulates
        )
        assert passes == kept
        frozen = replace(adapters, trained=0.0, made=0.0, frozen=float(layer))
        assert state_bytes(frozen, run) == state
        assert held.frozen > layer
    run = workload_of(
        cluster_run(model=adapted(WIDE), dp=2, **SHARED, **AGAIN)
    )  # casts of its only pass are all made early
    assert kept_of_weights(run, run.architecture.layers[0], again=True) > 1.9 * layer


def test_a_device_alone_has_the_gradients_of_a_part_beside_accumulators_and_zeros_that_clear_them():
    run = workload_of(cluster_run(model=WIDE, **accumulated(2)))
    held = step_work(run).updates[0].parameters
    assert weights_and_gradients(held, run) == 2 * 4 * held.updated
    assert more_at_update(held, run) == -4 * held.updated
    shapes = 1024 * 1024 + 2 * 1024 * 2816 + 512 * 1024 + 1024  # of attention, up and down, both tables, norms
    assert zeros_of_accumulators(run) == 4 * shapes
    assert zeros_of_accumulators(workload_of(cluster_run(model=WIDE))) == 0.0


@pytest.mark.parametrize(
    ("keys", "update", "found"),
    [
        ({"dp": 4, **SHARED}, {"master_weights": True}, 308.0),
        ({"dp": 4, **SHARED}, {"state_bits": 8}, 183.4),
        ({"dp": 2, "pp": 2, "micro": 2, **SHARED}, {"accumulate_in_float32": True}, 315.0),
        ({"dp": 2, "pp": 2, "micro": 2}, {"accumulate_in_float32": True}, 465.4),
    ],
)
def test_what_keys_of_the_optimizer_add_to_parameters_in_half_precision(keys, update, found):
    config = cluster_run(model={**WIDE, **HALF_PARAMETERS}, optimizer=update, **keys)
    assert stage_bytes(workload_of(config))[0] / MIB == pytest.approx(found, rel=WITHIN)
