"""A checkpoint that was trained in bfloat16 is evaluated in float32 on a CPU, which is said."""

from types import SimpleNamespace

import pytest

pytest.importorskip("lm_eval")

from mindllm.config import ModelConfig
from mindllm.config.generation import EvaluationConfig
from mindllm.evaluate import load

SIZES = {"vocab_size": 96, "hidden_size": 64, "num_layers": 2, "num_heads": 4, "seq_length": 32}


@pytest.mark.parametrize("trained", ["bfloat16", "float32"])
def test_what_a_checkpoint_was_trained_in_is_nobodys_wish(trained, tmp_path, monkeypatch):
    monkeypatch.setattr(load, "load_checkpoint", lambda *_, **__: SimpleNamespace(state={"tokenizer": __file__}))
    monkeypatch.setattr(load, "model_of", lambda _: ModelConfig(**SIZES, compute_dtype=trained))
    told = []
    config = load.run_of(tmp_path, EvaluationConfig(), progress=lambda what, done=0, total=None: told.append(what))
    assert config.model.config.compute_dtype == "float32"
    assert any("than the checkpoint's bfloat16" in what for what in told) == (trained == "bfloat16")
