"""LLaMA Pro: new layers begin by adding nothing, they alone are trained, and they are layers of the merged model."""

from __future__ import annotations

import numpy as np
import pytest
from tuned_runs import base_weights, batch, beside, snapshot, tuned_run, weights

from mindllm.finetune.transform import initial_weights
from mindllm.train.engine import ReplicaEngine
from mindllm.weight_files import merge_adapter

PET = {"pet_type": "llamapro", "num_new_blocks": 1}
BIASED = {
    "model_type": "gpt2",
    "normalization": "LayerNorm",
    "hidden_act": "gelu_tanh",
    "gated_linear_unit": False,
    "mlp_has_bias": True,
    "qkv_has_bias": True,
    "attn_proj_has_bias": True,
    "position_embedding_type": "learned_absolute",
    "tie_word_embeddings": True,
    "n_kv_heads": 4,
}


@pytest.fixture
def tuned(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = tuned_run(PET, **BIASED)
    return config, base_weights(config), beside(config, base_weights(config))


def test_new_layers_begin_by_adding_nothing_and_are_trained_alone(tuned):
    config, base, engine = tuned
    plain = ReplicaEngine(tuned_run(None, **BIASED), training=False)
    plain.load_state(base)
    assert engine.evaluate(batch(9))[0] == pytest.approx(plain.evaluate(batch(9))[0], rel=1e-6)
    before = weights(engine)
    for seed in range(2):
        assert not engine.step(batch(seed), 1e-2, 1.0).overflow
    changed = {name for name, value in weights(engine).items() if not np.array_equal(value, before[name])}
    shifted = "model.layers.2.attention.wk.bias"  # adds the same to all scores of a query: no gradient
    assert changed | {shifted} == {*config.model.config.architecture.trained_shapes()}
    assert all(name.startswith("model.layers.2.") for name in changed)
    whole = merge_adapter(
        config.model.config,
        base,
        {name: snapshot(engine)[name] for name in config.model.config.architecture.trained_shapes()},
    )
    longer = ReplicaEngine(tuned_run(None, **BIASED, num_layers=3), training=False)
    longer.load_state(whole)
    assert longer.evaluate(batch(9))[0] == pytest.approx(engine.evaluate(batch(9))[0], rel=1e-6)


def test_without_files_they_begin_by_adding_nothing_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    drawn = initial_weights(tuned_run(PET))
    assert not drawn["model.layers.2.attention.wo.weight"].any()
    assert not drawn["model.layers.2.feed_forward.w2.weight"].any()
    assert drawn["model.layers.2.attention.wq.weight"].any()
    assert drawn["model.layers.1.attention.wo.weight"].any()
