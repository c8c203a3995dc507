"""QK-clip scales the heads whose largest logit of a step, found by numpy, is above the threshold, and nothing else."""

from pathlib import Path

import numpy as np
import pytest

from mindllm import verify
from mindllm.config import load_config, override_config
from mindllm.errors import UserError
from mindllm.reduced_runs.model import single_device
from mindllm.train.engine import ReplicaEngine
from mindllm.verify.recomputed.update import update_problems

FORMS = Path(verify.__file__).parent / "forms"
RATE = 1e-2
LATENT = {  # the dense layers alone
    "model.model_config.model_type": "deepseek_v3",
    "model.model_config.rms_norm_eps": 1e-6,
    "model.model_config.expert_num": 8,
    "model.model_config.num_experts_chosen": 2,
    "model.model_config.first_k_dense_replace": 2,
    "model.model_config.moe_intermediate_size": 32,
    "model.model_config.moe_shared_expert_intermediate_size": 32,
    "model.model_config.use_gating_sigmoid": True,
    "model.model_config.balance_via_topk_bias": True,
    "model.model_config.topk_bias_update_rate": 0.01,
    "model.model_config.n_group": 4,
    "model.model_config.topk_group": 2,
    "model.model_config.n_kv_heads": 4,
    "model.model_config.kv_lora_rank": 16,
    "model.model_config.qk_nope_head_dim": 12,
    "model.model_config.qk_rope_head_dim": 8,
    "model.model_config.v_head_dim": 10,
}
BIASED = {
    "model.model_config.qkv_has_bias": True,
    "runner_config.batch_size": 4,
    "runner_config.gradient_accumulation_steps": 2,
}
CASES = [
    pytest.param(BIASED, id="grouped queries with biases, accumulated"),
    pytest.param(LATENT, id="latent"),
    pytest.param(
        {**LATENT, "model.model_config.q_lora_rank": 24}, id="latent of narrow queries", marks=pytest.mark.slow
    ),
]


def run(changes, threshold=None):
    """The form's model on one device, in fp32."""
    config = single_device(load_config(FORMS / "orthogonal_updates.yaml"))
    common = {
        "model.model_config.compute_dtype": "float32",
        "model.model_config.seq_length": 8,
        "runner_config.batch_size": 8,
        "optimizer.ns_steps": 1,
    }
    return override_config(config, {**common, "optimizer.qk_clip_threshold": threshold, **changes})


def batch(seed, config):
    """Rows of random tokens."""
    shape = (config.global_batch_size, config.model.config.seq_length + 1)
    tokens = np.random.default_rng(seed).integers(0, 128, shape).astype(np.int32)
    return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:], "loss_mask": np.ones_like(tokens[:, 1:], np.float32)}


def state(engine):
    """Weights and optimizer state in float32, by name."""
    return {name: item.asnumpy().copy() for name, item in {**engine.weights, **engine.optimizer_state}.items()}


class Model:
    """The forward pass of the small models in float64, written from the papers: what attention sees of a batch."""

    def __init__(self, config, values):
        self.architecture, self.epsilon = config.model.config.architecture, config.model.config.rms_norm_eps
        self.values = {name: value.astype(np.float64) for name, value in values.items()}

    def largest_logits(self, tokens):
        """``[layers, heads]``."""
        x, found = self.values["model.tok_embeddings.embedding_weight"][tokens], []
        for number, layer in enumerate(self.architecture.layers):
            at = f"model.layers.{number}"
            normed = self.normed(x, f"{at}.attention_norm.weight", self.epsilon)
            latent = "wk_plain" in "".join(layer.attention.weights())
            query, key, value = (self.latent if latent else self.plain)(normed, f"{at}.attention", layer.attention)
            scores = query @ np.swapaxes(key, -1, -2) * layer.attention.scale
            scores = np.where(np.tril(np.ones(scores.shape[-2:], bool)), scores, -np.inf)
            found.append(scores.max((0, 2, 3)))
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            context = (weights / weights.sum(-1, keepdims=True)) @ value
            x = x + self.by(np.swapaxes(context, 1, 2).reshape(*x.shape[:2], -1), f"{at}.attention.wo")
            normed = self.normed(x, f"{at}.ffn_norm.weight", self.epsilon)
            gate = self.by(normed, f"{at}.feed_forward.w1")
            x = x + self.by(
                gate / (1 + np.exp(-gate)) * self.by(normed, f"{at}.feed_forward.w3"), f"{at}.feed_forward.w2"
            )
        return np.array(found)

    def by(self, x, name):
        return x @ self.values[f"{name}.weight"].T + self.values.get(f"{name}.bias", 0.0)

    def normed(self, x, weight, epsilon):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon) * self.values[weight]

    def heads(self, x, name, count):
        projected = self.by(x, name)
        return np.swapaxes(projected.reshape(*x.shape[:2], count, -1), 1, 2)

    @staticmethod
    def rotated(x):
        half = x.shape[-1] // 2
        angle = np.arange(x.shape[-2])[:, None] / 10000.0 ** (np.arange(half) / half)
        first, second = x[..., :half], x[..., half:]
        turned = first * np.cos(angle) - second * np.sin(angle), second * np.cos(angle) + first * np.sin(angle)
        return np.concatenate(turned, -1)

    def plain(self, x, at, spec):
        heads, groups = spec.num_heads, spec.num_kv_heads
        query = self.rotated(self.heads(x, f"{at}.wq", heads))
        key, value = self.rotated(self.heads(x, f"{at}.wk", groups)), self.heads(x, f"{at}.wv", groups)
        return query, np.repeat(key, heads // groups, 1), np.repeat(value, heads // groups, 1)

    def latent(self, x, at, spec):
        heads, of_queries, up = spec.num_heads, x, ""
        if spec.q_lora_rank:
            of_queries, up = self.normed(self.by(x, f"{at}.wq_down"), f"{at}.query_latent_norm.weight", 1e-6), "up_"
        narrow = self.normed(self.by(x, f"{at}.wkv_down"), f"{at}.key_value_latent_norm.weight", 1e-6)
        turned = self.rotated(self.heads(of_queries, f"{at}.wq_{up}rotary", heads))
        query = np.concatenate((self.heads(of_queries, f"{at}.wq_{up}plain", heads), turned), -1)
        shared = np.repeat(self.rotated(self.heads(x, f"{at}.wk_rotary", 1)), heads, 1)
        key = np.concatenate((self.heads(narrow, f"{at}.wk_plain", heads), shared), -1)
        return query, key, self.heads(narrow, f"{at}.wv", heads)


def factors(largest, threshold, groups):
    """By the heads of one key head ``[layers, groups]``."""
    return np.minimum(1, threshold / np.maximum(largest.reshape(len(largest), groups, -1).max(-1), 1e-30))


def scaled(name, value, factor):
    """A weight as the paper scales it: the rows of each head by their power of its factor."""
    module = name.split(".attention.")[-1].split(".")[0]
    if ".attention." not in name or module in ("wk_rotary", "wv", "wo", "wq_down", "wkv_down") or "norm" in module:
        return value
    one = factor[int(name.split(".")[2])] ** (1 if "rotary" in module else 0.5)
    rows = value.reshape(len(one), -1)
    return (rows * one[:, None]).reshape(value.shape)


@pytest.mark.parametrize("changes", CASES)
def test_heads_above_the_threshold_are_scaled_behind_the_update(changes):
    plain = ReplicaEngine(run(changes))
    random = np.random.default_rng(0)
    loud = {
        name: value * random.uniform(3, 12) + (0.1 if name.endswith("bias") else 0)
        for name, value in state(plain).items()
        if ".attention.wq" in name or ".attention.wk" in name
    }
    plain.load_state(loud)
    first = Model(plain.config, state(plain)).largest_logits(batch(0, plain.config)["input_ids"])
    threshold = float(np.quantile(first, 0.4))
    clipped = ReplicaEngine(run(changes, threshold))
    for step in range(2):
        before, columns = state(plain), batch(step, plain.config)
        clipped.load_state(before)
        largest = Model(plain.config, before).largest_logits(columns["input_ids"])
        factor = factors(largest, threshold, plain.config.model.config.architecture.layers[0].attention.num_kv_heads)
        assert np.any(factor < 1 - 1e-2)
        assert np.any(factor == 1)
        result = clipped.step(columns, RATE, 1.0)
        assert plain.step(columns, RATE, 1.0) == result
        found = state(clipped)
        for name, value in state(plain).items():
            is_state = name.startswith(("muon_m.", "adam_")) or "power" in name
            expected = value if is_state else scaled(name, value, factor)
            np.testing.assert_allclose(found[name], expected, rtol=2e-5, atol=1e-7, err_msg=name)
        plain.load_state(found)
        for louder, wrong in ((1.0, False), (1.5, True)):  # as the check asks of a single device
            logits = {layer: louder * value for layer, value in clipped.largest_logits().items()}
            norm = result.global_norm
            problems = list(
                update_problems(clipped.config, step + 1, lambda _: RATE, norm, before, found, largest=logits)
            )
            assert bool(problems) == wrong
            assert all(".attention.wq" in problem or ".attention.wk" in problem for problem in problems)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"optimizer.type": "AdamW"}, "is a key of type Muon"),
        ({"model.model_config.qk_layernorm": True}, "normed .qk_layernorm., which undoes any factor"),
        ({"model.model_config.attn_logit_softcapping": 50.0}, "logits stay below 50 by themselves"),
        ({"model.model_config.position_embedding_type": "alibi"}, "a bias that no weight scales"),
        (
            {"model.model_config.pet_config": {"pet_type": "full", "freeze_include": ["*wk.weight"]}},
            "wk.weight is frozen, and is not scaled",
        ),
        ({"optimizer.qk_clip_threshold": 0}, "greater than 0"),
    ],
)
def test_heads_that_cannot_be_scaled_are_refused_by_the_key(changes, words):
    with pytest.raises(UserError, match=f"optimizer.qk_clip_threshold.*{words}"):
        run(changes, 100.0)
