"""Adapters that PEFT writes in all its forms: what PEFT computes with them is what the merged weights compute here, or an error
names the key.
"""

from __future__ import annotations

import json
from dataclasses import fields

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from safetensors.numpy import load_file, save_file  # noqa: E402

from mindllm.config import read_model_config  # noqa: E402
from mindllm.errors import UserError  # noqa: E402
from mindllm.weight_files import (  # noqa: E402
    merge_adapter,
    read_hugging_face,
    write_weights,
)
from mindllm.weight_files.peft import write_peft  # noqa: E402
from mindllm.weight_files.peft_reading import (  # noqa: E402
    ALLOWED,
    check_keys,
    read_peft,
    subtract_initial,
)

TOKENS = torch.tensor(np.random.default_rng(0).integers(3, 97, (2, 24)))
TWO = ["q_proj", "down_proj"]
LAYERS_DIFFER = r".*\.[02]\.self_attn\.(q|v)_proj|.*\.1\.mlp\.up_proj"
READ = {
    "pissa": {"target_modules": TWO, "init_lora_weights": "pissa"},
    "pissa, rslora": {"target_modules": TWO, "init_lora_weights": "pissa", "use_rslora": True},
    "pissa, dora": {"target_modules": TWO, "init_lora_weights": "pissa", "use_dora": True},
    "pissa of the head": {"target_modules": ["q_proj", "lm_head"], "init_lora_weights": "pissa"},
    "olora": {"target_modules": TWO, "init_lora_weights": "olora"},
    "olora, patterns": {
        "target_modules": TWO,
        "init_lora_weights": "olora",
        "rank_pattern": {"down_proj": 2},
        "alpha_pattern": {"layers.0.self_attn.q_proj": 17},
    },
    "orthogonal": {"target_modules": TWO, "init_lora_weights": "orthogonal"},
    "patterns": {
        "target_modules": TWO,
        "rank_pattern": {"down_proj": 7},
        "alpha_pattern": {"layers.0.self_attn.q_proj": 17},
    },
    "rank_pattern, rslora": {"target_modules": TWO, "rank_pattern": {"down_proj": 2}, "use_rslora": True},
    "layers_to_transform": {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [1]},
    "expression": {"target_modules": LAYERS_DIFFER},
    "expression, dora": {"target_modules": LAYERS_DIFFER, "use_dora": True},
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "head and embedding saved": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
    "module of one layer saved": {"target_modules": ["q_proj"], "modules_to_save": ["layers.1.mlp.down_proj"]},
}
TIED = {
    "embedding saved": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "embedding": {"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True},
}
REFUSED = {
    "pissa_niter_4": ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights", "path_initial_model"),
    "bias": ({"bias": "all"}, "bias", "merge_and_unload"),
    "lora_bias": ({"lora_bias": True}, "lora_bias", "merge_and_unload"),
    "tokens": ({"trainable_token_indices": [1, 2]}, "trainable_token_indices", "merge_and_unload"),
}


@pytest.fixture(autouse=True)
def _quiet(recwarn):
    transformers.logging.set_verbosity_error()


def directory_of_base(path, tied=False):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        initializer_range=0.2,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return directory_of_base(tmp_path_factory.mktemp("base") / "untied")


@pytest.fixture(scope="module")
def tied_base(tmp_path_factory):
    return directory_of_base(tmp_path_factory.mktemp("base") / "tied", tied=True)


def load(directory):
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


def trained(directory, base, **keys):
    """An adapter of PEFT that has moved away from how it begins."""
    model = peft.get_peft_model(load(base), peft.LoraConfig(r=4, lora_alpha=6, task_type="CAUSAL_LM", **keys))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    model.save_pretrained(directory)
    return directory


def logits(model):
    with torch.inference_mode():
        return model.eval()(TOKENS).logits.numpy()


def with_peft(base, directory):
    return logits(peft.PeftModel.from_pretrained(load(base), directory))


def assert_same_logits(base, directory, tmp_path):
    """PEFT's logits are those of the merged weights, and of PEFT with the adapter written again."""
    plain = read_model_config(base)
    weights = read_hugging_face(base, plain)
    adapter = read_peft(directory, plain, weights)
    model = adapter.model(plain)
    write_weights(tmp_path / "merged", model.merged, merge_adapter(model, weights, adapter.weights))
    write_peft(tmp_path / "again", model, adapter.weights, None)
    expected = with_peft(base, directory)
    assert np.abs(expected - logits(load(base))).max() > 1e-2
    np.testing.assert_allclose(logits(load(tmp_path / "merged")), expected, atol=1e-4)
    np.testing.assert_allclose(with_peft(base, tmp_path / "again"), expected, atol=1e-4)


@pytest.mark.parametrize("case", READ)
def test_an_adapter_computes_what_peft_computes(case, base, tmp_path):
    assert_same_logits(base, trained(tmp_path / "adapter", base, **READ[case]), tmp_path)


@pytest.mark.parametrize("case", TIED)
def test_an_adapter_that_keeps_head_and_embedding_tied_is_read(case, tied_base, tmp_path):
    assert_same_logits(tied_base, trained(tmp_path / "adapter", tied_base, **TIED[case]), tmp_path)


@pytest.mark.parametrize("keys", [{"target_modules": ["q_proj", "lm_head"]}, READ["head and embedding saved"]])
def test_an_adapter_that_unties_head_and_embedding_is_refused(keys, tied_base, tmp_path):
    directory = trained(tmp_path / "adapter", tied_base, **keys)
    model = read_model_config(tied_base)
    with pytest.raises(UserError, match=r"separates lm_head from the embedding.*tie_word_embeddings"):
        read_peft(directory, model, read_hugging_face(tied_base, model))


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_computed_is_refused_by_its_key(case, base, tmp_path):
    keys, key, fix = REFUSED[case]
    directory = trained(tmp_path / "adapter", base, target_modules=["q_proj"], **keys)
    model = read_model_config(base)
    with pytest.raises(UserError, match=f"adapter_config.json: {key}: .*{fix}"):
        read_peft(directory, model, read_hugging_face(base, model))


def test_transposed_matrices_of_gpt2_with_pissa(tmp_path):
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.2
    )
    base = tmp_path / "base"
    transformers.GPT2LMHeadModel(config).save_pretrained(base)
    keys = {"target_modules": ["c_attn", "mlp.c_proj"], "init_lora_weights": "pissa", "fan_in_fan_out": True}
    assert_same_logits(base, trained(tmp_path / "adapter", base, **keys), tmp_path)


def test_a_wrong_rank_and_a_wrong_shape_are_named(base, tmp_path):
    directory = trained(tmp_path / "adapter", base, target_modules=["q_proj"])
    model = read_model_config(base)
    content = json.loads((directory / "adapter_config.json").read_text())
    (directory / "adapter_config.json").write_text(json.dumps({**content, "r": 3}))
    with pytest.raises(UserError, match=r"layers\.0\.self_attn\.q_proj\.lora_A has rank 4.* gives 3 .*correct r"):
        read_peft(directory, model)
    (directory / "adapter_config.json").write_text(json.dumps(content))
    tensors = load_file(directory / "adapter_model.safetensors")
    name = "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"
    save_file({**tensors, name: tensors[name][:16]}, directory / "adapter_model.safetensors")
    with pytest.raises(UserError, match=r"layers\.1\.self_attn\.q_proj .*shape \[16, 4\], expected \[32, 4\]"):
        read_peft(directory, model)


def test_every_key_of_peft_is_read_or_refused_and_unknown_ones_are_refused(tmp_path):
    plain = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM").to_dict()
    plain = {**plain, "peft_type": "LORA", "task_type": "CAUSAL_LM", "target_modules": ["q_proj"]}
    path = tmp_path / "adapter_config.json"
    check_keys(path, plain)
    for key in {item.name for item in fields(peft.LoraConfig)} - ALLOWED.keys():
        with pytest.raises(UserError, match=f"{key}: unsupported"):
            check_keys(path, {**plain, key: "something"})
    check_keys(path, {**plain, "key_of_tomorrow": None})
    with pytest.raises(UserError, match="key_of_tomorrow: unsupported"):
        check_keys(path, {**plain, "key_of_tomorrow": 0.5})


def test_the_largest_singular_values_are_found_without_all_others():
    random = np.random.default_rng(0)
    weight = random.normal(size=(300, 400)).astype(np.float32)
    first, second = subtract_initial("pissa", weight, 8, 0.5, "name")
    left, values, right = np.linalg.svd(weight.astype(np.float64), full_matrices=False)
    np.testing.assert_allclose(-0.5 * second @ first, left[:, :8] * values[:8] @ right[:8], atol=1e-4)


@pytest.mark.parametrize(("method", "weight"), [("pissa", np.eye(8)), ("olora", np.ones((8, 8)))])
def test_a_base_that_does_not_determine_its_update_is_refused(method, weight):
    with pytest.raises(UserError, match="not determined"):
        subtract_initial(method, weight, 3, 1.0, "name")
