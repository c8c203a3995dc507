"""Parameters in half precision: their update next to other formulas, their types, checkpoints, refusals."""

from __future__ import annotations

import logging

import mindspore as ms
import ml_dtypes
import numpy as np
import pytest
import yaml
from mindspore import Tensor

from mindllm.config import ModelConfig, load_config
from mindllm.config.optimizer import OptimizerConfig
from mindllm.errors import UserError
from mindllm.finetune.transform import build_tuned_model
from mindllm.models.weights import WeightType, assign, make_weight, trained_weights, value_type
from mindllm.train.checkpoint import CheckpointStore, load_checkpoint
from mindllm.train.engine import ReplicaEngine
from mindllm.train.engine.engine import trained_signatures
from mindllm.train.optimizers.adamw import AdamW
from mindllm.train.optimizers.adamw_8bit import AdamW8bit
from mindllm.train.optimizers.muon import MuonAdamW
from mindllm.train.step import TrainStep

BF16, FP16 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)
TYPES = {BF16: ms.bfloat16, FP16: ms.float16}
MODEL = {
    "vocab_size": 61, "hidden_size": 16, "num_layers": 2, "num_heads": 4, "n_kv_heads": 2, "intermediate_size": 24,
    "seq_length": 8, "compute_dtype": "bfloat16", "param_init_type": "bfloat16",
}  # fmt: skip
RUN = {
    "lr_schedule": {"type": "ConstantWarmUpLR", "learning_rate": 1e-2},
    "train_dataset": {"data_loader": {"config": {"data_path": "unused"}}},
    "context": {"enable_graph_kernel": False, "compile_cache": False},
    "runner_config": {"batch_size": 2, "train_steps": 8},
}


def run_of(directory, sections=None, **keys):
    path = directory / "run.yaml"
    tree = {**RUN, **(sections or {}), "model": {"model_config": {**MODEL, **keys}}}
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return load_config(path)


def batch(seed):
    random = np.random.default_rng(seed)
    tokens = random.integers(0, MODEL["vocab_size"], (2, MODEL["seq_length"] + 1)).astype(np.int32)
    return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:], "loss_mask": np.ones((2, 8), np.float32)}


def mindformers_update(weight, first, second, gradient, step, rate, config, corrects):
    """One step of ``FP32StateAdamWeightDecay``, or with ``corrects`` of ``AdamW``: float32 from the cast weight, cast back."""
    (beta1, beta2), kind = config.betas, weight.dtype
    wide, gradient = weight.astype(np.float32), gradient.astype(np.float32)
    decay = config.weight_decay if weight.ndim > 1 else 0.0
    first = beta1 * first + (1 - beta1) * gradient
    second = beta2 * second + (1 - beta2) * gradient**2
    left1, left2 = (1 - beta1**step, 1 - beta2**step) if corrects else (1.0, 1.0)
    change = first / left1 / (np.sqrt(second / left2) + config.eps) + decay * wide
    return (wide - rate * change).astype(kind), first, second


def half_model(name):
    """The model of a parity test with parameters in bfloat16, computed in float32."""
    from tests.parity.test_llama_torch import LENGTH, MODELS, VOCABULARY

    fields = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "head_dim": 16}
    half = {"intermediate_size": 80, "seq_length": LENGTH, "param_init_type": "bfloat16"}
    return ModelConfig(**(fields | half | MODELS[name]))


def ulps(found, wanted, kind):
    """Distances in units of the last place of ``wanted``."""
    spacing = np.spacing(np.abs(wanted.astype(kind)).astype(kind)).astype(np.float32)
    return np.abs(found.astype(np.float32) - wanted.astype(np.float32)) / spacing


@pytest.mark.parametrize("corrects", [False, True])
@pytest.mark.parametrize("kind", [BF16, FP16], ids=["bfloat16", "float16"])
def test_five_steps_are_those_of_the_formula_of_mindformers(kind, corrects):
    random, config = np.random.default_rng(0), OptimizerConfig(bias_correction=corrects, weight_decay=0.1)
    shapes = {"w": (8, 12), "bias": (12,)}
    held = {name: random.normal(0, 0.1, shape).astype(kind) for name, shape in shapes.items()}
    weights = {
        name: make_weight(name, "zeros", shape, WeightType(TYPES[kind], ms.float32)) for name, shape in shapes.items()
    }
    assign(weights, held)
    optimizer = AdamW(list(weights.values()), config)
    moments = {name: (np.zeros(shape, np.float32), np.zeros(shape, np.float32)) for name, shape in shapes.items()}
    for step in range(1, 6):
        gradients = {name: random.normal(0, 1, shape).astype(kind) for name, shape in shapes.items()}
        scaled = {name: (item.astype(np.float32) * np.float32(0.3)).astype(kind) for name, item in gradients.items()}
        rate = 1e-2 * step
        given = tuple(Tensor(item.astype(np.float32)) for item in gradients.values())
        optimizer(given, Tensor(0.3, ms.float32), Tensor(rate, ms.float32))
        for name in shapes:
            held[name], *moments[name] = mindformers_update(
                held[name], *moments[name], scaled[name], step, np.float32(rate), config, corrects
            )
            found = weights[name].asnumpy()
            assert np.array_equal(found, found.astype(kind).astype(np.float32))  # rounded
            assert ulps(found, held[name], kind).max() <= 1
            held[name] = found.astype(kind)  # or a difference of rounding would go on
            np.testing.assert_allclose(
                optimizer.moments1[list(shapes).index(name)].asnumpy(), moments[name][0], rtol=1e-5, atol=1e-6
            )


def test_training_equals_torch_with_bf16_parameters_and_fp32_state():
    torch = pytest.importorskip("torch")
    from tests.parity.test_llama_torch import HUGGING_FACE, random_batch, random_model, torch_loss

    _, llama = random_model("grouped", std=0.05)
    lm = build_tuned_model(half_model("grouped"))
    weights = trained_weights(lm)
    rounded = {HUGGING_FACE.theirs(name) for name, item in weights.items() if value_type(item) == ms.bfloat16}
    named = dict(llama.named_parameters())
    with torch.no_grad():
        for name in rounded:
            named[name].copy_(named[name].bfloat16().float())
    assign(weights, {name: named[HUGGING_FACE.theirs(name)].detach().numpy() for name in weights})
    config = OptimizerConfig()
    step = TrainStep(lm, AdamW(lm.trainable_params(), config), 1.0).set_train()
    groups = [
        {"params": [item], "weight_decay": config.weight_decay if item.ndim > 1 else 0.0} for item in named.values()
    ]
    optimizer = torch.optim.AdamW(groups, betas=config.betas, eps=config.eps)
    for count in range(5):
        rate, columns = 1e-3 * (count + 1), random_batch(count)
        loss, norm, *_ = step(*map(Tensor, columns), Tensor(rate, ms.float32), Tensor(1.0, ms.float32))
        expected = torch_loss(llama, *columns)
        expected.backward()
        with torch.no_grad():
            for name in rounded:
                named[name].grad.copy_(named[name].grad.bfloat16().float())
        wanted = torch.nn.utils.clip_grad_norm_(llama.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for name in rounded:
                named[name].copy_(named[name].bfloat16().float())
        assert float(loss) == pytest.approx(expected.item(), abs=2e-4)
        assert float(norm) == pytest.approx(wanted.item(), rel=3e-3)
    for name, item in weights.items():
        found, wanted = item.asnumpy(), named[HUGGING_FACE.theirs(name)].detach().numpy()
        if HUGGING_FACE.theirs(name) in rounded:
            place = np.spacing(np.abs(wanted).astype(BF16)).astype(np.float32)
            assert np.mean(np.abs(found - wanted) > place + 2e-4) < 0.01  # a rounded gradient moves an update a little
        np.testing.assert_allclose(found, wanted, atol=2e-3)


FAMILIES = {
    "dense": {},
    "tied, biased": {"tie_word_embeddings": True, "qkv_has_bias": True, "attn_proj_has_bias": True},
    "layer norms": {
        "model_type": "gpt2", "normalization": "LayerNorm", "hidden_act": "gelu_tanh", "gated_linear_unit": False,
        "mlp_has_bias": True, "qkv_has_bias": True, "attn_proj_has_bias": True, "tie_word_embeddings": True,
        "position_embedding_type": "learned_absolute", "n_kv_heads": 4,
    },
    "norms of heads": {"model_type": "qwen3", "qk_layernorm": True},
    "experts": {"model_type": "mixtral", "expert_num": 4, "num_experts_chosen": 2},
    "grouped experts": {"model_type": "mixtral", "expert_num": 4, "num_experts_chosen": 2, "moe_grouped_gemm": True},
    "latent attention, experts, a layer that predicts ahead": {
        "model_type": "deepseek_v3", "n_kv_heads": 4, "rms_norm_eps": 1e-6, "kv_lora_rank": 16, "q_lora_rank": 24,
        "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10, "expert_num": 4, "num_experts_chosen": 2,
        "moe_shared_expert_intermediate_size": 32, "moe_intermediate_size": 32, "use_gating_sigmoid": True,
        "balance_via_topk_bias": True, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1,
    },
    "adapters": {"pet_config": {"lora_rank": 2}},
    "adapters with lengths": {"pet_config": {"lora_rank": 2, "use_dora": True, "frozen_dtype": "float32"}},
    "bottlenecks": {"pet_config": {"pet_type": "bottleneck", "adapter_length": 4}},
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("target", ["CPU", "Ascend"])
def test_weights_have_the_types_that_the_configuration_says(tmp_path, name, target):
    config = run_of(tmp_path, **FAMILIES[name])
    model = config.model.config
    wanted = {weight: kind.name for weight, (_, kind) in trained_signatures(config).items()}
    trained = trained_weights(build_tuned_model(model, target))
    found = {weight: str(value_type(item)).lower() for weight, item in trained.items()}
    assert found == wanted
    assert "bfloat16" in wanted.values()
    assert all(kind == "float32" for weight, kind in wanted.items() if "norm" in weight or ".router." in weight)
    stored = {str(item.dtype).lower() for item in trained.values() if value_type(item) == ms.bfloat16}
    assert stored == {"float32" if target == "CPU" else "bfloat16"}


def test_norms_have_the_type_that_they_compute_in(tmp_path):
    model = run_of(tmp_path, layernorm_compute_type="bfloat16").model.config
    assert model.parameter_type("model.norm_out.weight") == "bfloat16"
    single = run_of(tmp_path, layernorm_compute_type="bfloat16", param_init_type="float32").model.config
    assert single.parameter_type("model.norm_out.weight") == "float32"


def test_a_checkpoint_keeps_the_types_and_goes_on_bit_for_bit(tmp_path):
    config = run_of(tmp_path)
    engine = ReplicaEngine(config)
    for seed in range(2):
        engine.step(batch(seed), 1e-2, 1.0)
    path = CheckpointStore(tmp_path / "checkpoints", keep_checkpoint_max=1).save(2, engine.local_state(), {"step": 2})
    saved = load_checkpoint(path)
    assert {item.dtype.name for name, item in saved.weights.items() if "norm" not in name} == {"bfloat16"}
    assert {item.dtype.name for item in saved.optimizer.values()} == {"float32"}
    resumed = ReplicaEngine(config)
    resumed.load(saved)
    assert [resumed.step(batch(5), 1e-2, 1.0)] == [engine.step(batch(5), 1e-2, 1.0)]
    for name, item in engine.weights.items():
        assert np.array_equal(item.asnumpy(), resumed.weights[name].asnumpy())


def test_a_resumed_run_may_change_the_type_and_says_so(tmp_path, caplog):
    engines = {kind: ReplicaEngine(run_of(tmp_path, param_init_type=kind)) for kind in ("float32", "bfloat16")}
    for kind, other, word in (("float32", "bfloat16", "rounded"), ("bfloat16", "float32", "converted")):
        store = CheckpointStore(tmp_path / kind, keep_checkpoint_max=1)
        path = store.save(1, engines[kind].local_state(), {"step": 1})
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            engines[other].load(load_checkpoint(path))
        assert f"from {kind} {word} to {other} (model.model_config.param_init_type)" in caplog.text
        for name, item in engines[kind].weights.items():
            found = engines[other].weights[name].asnumpy()
            wanted = item.asnumpy() if other == "float32" or "norm" in name else item.asnumpy().astype(BF16)
            assert np.array_equal(found, wanted.astype(np.float32))


def test_a_gradient_beyond_float16_leaves_everything_as_it_is(tmp_path):
    engine = ReplicaEngine(run_of(tmp_path, compute_dtype="float32", param_init_type="float16"))
    before = {name: item.asnumpy().copy() for name, item in engine.weights.items()}
    result = engine.step(batch(0), 1e-2, 1e9)
    assert result.overflow
    assert all(np.array_equal(item, engine.weights[name].asnumpy()) for name, item in before.items())
    assert not engine.step(batch(0), 1e-2, 1.0).overflow


def test_other_optimizers_update_in_float32_and_round():
    random, config = np.random.default_rng(0), OptimizerConfig(state_bits=8, state_block_size=16, type="AdamW")
    muon = OptimizerConfig(type="Muon")
    name = "model.layers.0.feed_forward.w1.weight"
    for make, own in ((AdamW8bit, config), (MuonAdamW, muon)):
        held = random.normal(0, 0.1, (16, 32)).astype(BF16)
        results = []
        for stored in (WeightType(ms.bfloat16, ms.float32), WeightType(ms.float32, ms.float32)):
            weight = make_weight(name, "zeros", held.shape, stored)
            assign({name: weight}, {name: held})
            gradient = Tensor(np.random.default_rng(1).normal(0, 1, held.shape).astype(np.float32))
            make([weight], own)((gradient,), Tensor(1.0, ms.float32), Tensor(1e-2, ms.float32))
            results.append(weight.asnumpy())
        assert np.array_equal(results[0], results[1].astype(BF16).astype(np.float32))
        assert not np.array_equal(results[0], held.astype(np.float32))


@pytest.mark.parametrize("kind", ["lisa", "galore", "adalora"])
def test_updates_that_need_float32_are_refused(tmp_path, kind):
    with pytest.raises(
        UserError, match=f"param_init_type: pet_type {kind} updates float32 parameters alone .*write float32"
    ):
        run_of(tmp_path, pet_config={"pet_type": kind})


def test_figures_that_rounding_hides_are_refused(tmp_path):
    with pytest.raises(UserError, match="a rounded parameter"):
        run_of(tmp_path, {"monitor_config": {"monitor_on": True, "update_ratio_format": "log"}})


def test_master_weights_are_updated_in_float32_and_rounded():
    random, shape = np.random.default_rng(0), (8, 12)
    held = random.normal(0, 0.1, shape).astype(BF16)
    kinds = (WeightType(ms.bfloat16, ms.float32), WeightType(ms.float32, ms.float32))
    weights = [make_weight("w", "zeros", shape, kind) for kind in kinds]
    for weight in weights:
        assign({"w": weight}, {"w": held})
    half, single = (
        AdamW([weight], OptimizerConfig(master_weights=masters))
        for weight, masters in zip(weights, (True, False), strict=True)
    )
    for _ in range(4):
        gradient = Tensor(random.normal(0, 1, shape).astype(np.float32))
        for optimizer in (half, single):
            optimizer((gradient,), Tensor(1.0, ms.float32), Tensor(1e-4, ms.float32))
    master = half.masters[0].asnumpy()
    np.testing.assert_array_equal(master, weights[1].asnumpy())  # steps below the rounding of bf16 add up
    np.testing.assert_array_equal(weights[0].asnumpy(), master.astype(BF16).astype(np.float32))
    assert half.masters[0].name == "master.w"


def test_a_run_with_master_weights_goes_on_bit_for_bit(tmp_path):
    config = run_of(tmp_path, {"optimizer": {"master_weights": True}})
    engine, resumed = ReplicaEngine(config), ReplicaEngine(config)
    engine.step(batch(0), 1e-3, 1.0)
    path = CheckpointStore(tmp_path / "checkpoints", keep_checkpoint_max=1).save(1, engine.local_state(), {"step": 1})
    saved = load_checkpoint(path)
    masters = {name for name in saved.optimizer if name.startswith("master.")}
    assert masters == {f"master.{name}" for name, item in saved.weights.items() if item.dtype.name == "bfloat16"}
    resumed.load(saved)
    assert resumed.step(batch(1), 1e-3, 1.0) == engine.step(batch(1), 1e-3, 1.0)
    for name, item in engine.weights.items():
        assert np.array_equal(item.asnumpy(), resumed.weights[name].asnumpy())


@pytest.mark.parametrize(
    ("sections", "keys", "why"),
    [
        ({}, {"param_init_type": "float32"}, "copies parameters in half precision"),
        ({"type": "Muon"}, {}, "is a key of type AdamW with state_bits 32"),
        ({}, {"pet_config": {"lora_rank": 2}}, "pet_type lora trains small weights"),
    ],
)
def test_master_weights_are_refused_where_nothing_is_copied(tmp_path, sections, keys, why):
    with pytest.raises(UserError, match=f"master_weights: {why}.*write false"):
        run_of(tmp_path, {"optimizer": {"master_weights": True, **sections}}, **keys)


def test_float32_copies_are_made_used_and_left_behind(tmp_path):
    copied = {"optimizer": {"master_weights": True}}
    runs = {
        "single": run_of(tmp_path, param_init_type="float32"),
        "copied": run_of(tmp_path, copied),
        "half": run_of(tmp_path),
    }
    engines = {name: ReplicaEngine(config) for name, config in runs.items()}
    name = "model.layers.0.feed_forward.w1.weight"
    saved = {}
    for key, engine in engines.items():
        engine.step(batch(0), 1e-3, 1.0)
        store = CheckpointStore(tmp_path / key, keep_checkpoint_max=1)
        saved[key] = load_checkpoint(store.save(1, engine.local_state(), {"step": 1}))
    exact = np.array(saved["single"].weights[name])
    master = np.array(saved["copied"].optimizer[f"master.{name}"])
    engines["copied"].load(saved["single"])
    np.testing.assert_array_equal(engines["copied"].optimizer_state[f"master.{name}"].asnumpy(), exact)
    engines["single"].load(saved["copied"])
    np.testing.assert_array_equal(engines["single"].weights[name].asnumpy(), master)
    engines["half"].load(saved["copied"])
    np.testing.assert_array_equal(engines["half"].weights[name].asnumpy(), master.astype(BF16).astype(np.float32))
    engines["copied"].load(saved["half"])
    found = engines["copied"].optimizer_state[f"master.{name}"].asnumpy()
    np.testing.assert_array_equal(found, np.array(saved["half"].weights[name]).astype(np.float32))


def test_a_proof_says_what_parameters_in_half_precision_mean(tmp_path):
    from mindllm.prove.expected import configuration

    assert configuration(run_of(tmp_path)).says.endswith("in bfloat16, updated in float32 and rounded, no float32 copy")
    copied = run_of(tmp_path, {"optimizer": {"master_weights": True}})
    assert configuration(copied).says.endswith("updated as float32 copies, then rounded")
    assert "float32" not in configuration(run_of(tmp_path, param_init_type="float32")).says
