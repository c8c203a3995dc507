"""Adapters beside the projections of latent attention: they compute what merged weights compute, and each of them drops."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import ParameterTuple, Tensor

from mindllm.architecture.adapters import MAGNITUDE
from mindllm.config import ModelConfig
from mindllm.families import with_file_names
from mindllm.finetune.transform import build_tuned_model
from mindllm.models import build_model
from mindllm.models.weights import assign, model_weights, trained_weights
from mindllm.random_keys import random_keys
from mindllm.train.step import ForwardBackward
from mindllm.weight_files import merge_adapter

FIELDS = {
    **{"vocab_size": 97, "hidden_size": 32, "num_layers": 1, "num_heads": 4, "n_kv_heads": 4, "seq_length": 16},
    **{
        "model_type": "deepseek_v2",
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 10,
    },
}
COMPRESSED = {**FIELDS, "q_lora_rank": 24}
OF_QUERIES = {"compressed": ["wq_down", "wq_up_plain", "wq_up_rotary"], "whole": ["wq_plain", "wq_rotary"]}
SIZES = {"compressed": COMPRESSED, "whole": FIELDS}
MODULES = ["wkv_down", "wk_rotary", "wk_plain", "wv", "wo"]
QUICK = (("compressed", "wq_up_rotary"), ("whole", "wk_rotary"))
CASES = [
    pytest.param(form, module, marks=() if (form, module) in QUICK else pytest.mark.slow)
    for form, names in OF_QUERIES.items()
    for module in (*names, *MODULES)
]


def losses(model, *keys):
    step = ForwardBackward(model, ParameterTuple(list(trained_weights(model).values())))
    tokens = np.random.default_rng(0).integers(0, 97, (2, 17)).astype(np.int32)
    batch = tuple(map(Tensor, (tokens[:, :-1], tokens[:, 1:], np.ones((2, 16), np.float32))))
    further = [() if key is None else (None, None, key) for key in keys]
    return [float(step(*batch, Tensor(1.0, ms.float32), *more)[0].asnumpy()) for more in further]


def tuned(form, **pet):
    """A tuned model, and random values of all its weights."""
    config = with_file_names(ModelConfig.model_validate({**SIZES[form], "pet_config": {"lora_rank": 4, **pet}}))
    random, model = np.random.default_rng(1), build_tuned_model(config)
    shapes = config.architecture.weight_shapes()
    values = {name: random.normal(0, 0.2, shape).astype(np.float32) for name, shape in shapes.items()}
    values |= {name: np.abs(value) + 0.5 for name, value in values.items() if "norm" in name or MAGNITUDE in name}
    assign(model_weights(model), values)
    return config, model, values


@pytest.mark.parametrize("kind", [{}, {"use_dora": True}], ids=["lora", "dora"])
@pytest.mark.parametrize("form", SIZES)
def test_adapters_compute_what_merged_weights_compute(form, kind):
    config, model, values = tuned(form, **kind)
    plain = build_model(config.base)
    names = config.base.architecture.weight_shapes()
    assign(model_weights(plain), merge_adapter(config, {name: values[name] for name in names}, values))
    assert losses(model, None)[0] == pytest.approx(losses(plain, None)[0], abs=2e-5)


@pytest.mark.parametrize(("form", "module"), CASES)
def test_the_adapter_of_every_projection_drops(form, module):
    _, model, _ = tuned(form, target_modules=[module], lora_dropout=0.3)
    keys = [Tensor(np.stack([random_keys(seed, sample, 16) for sample in range(2)])) for seed in (1, 2)]
    first, other, evaluated = losses(model, *keys, None)
    assert len({first, other, evaluated}) == 3
