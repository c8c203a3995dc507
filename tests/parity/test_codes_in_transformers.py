"""What ``mindllm weights quantize`` writes, loaded by ``transformers`` with GPT-QModel's kernels for CPU: logits beside ours.

Needs ``pip install gptqmodel optimum`` beside the test extra; without them it is skipped. The kernels compute in 16 bits in part:
logits are compared to a hundredth of the largest one.
"""

from __future__ import annotations

import numpy as np
import pytest

from mindllm.cli.weights import main
from mindllm.config import ModelConfig, read_model_config
from mindllm.data import load_tokenizer
from mindllm.data.tokenizers.sentencepiece_tokenizer import train_tokenizer
from mindllm.weight_files import read_hugging_face, write_weights

pytestmark = pytest.mark.slow

TEXT = "def add(first, second):\n    return first + second\n\n\n" * 60
MODEL = ModelConfig(
    model_type="llama",
    vocab_size=320,
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    n_kv_heads=2,
    intermediate_size=128,
    seq_length=32,
)
METHODS = {
    "rtn, 4 bits": ("--method", "rtn"),
    "rtn, 8 bits": ("--method", "rtn", "--bits", "8"),
    "gptq": ("--method", "gptq", "--calibration", "text.txt"),
    "gptq, act order": ("--method", "gptq", "--act-order", "--calibration", "text.txt"),
    "awq": ("--method", "awq", "--calibration", "text.txt"),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A model with its tokenizer, and a text."""
    place = tmp_path_factory.mktemp("base")
    (place / "text.txt").write_text(TEXT)
    train_tokenizer([TEXT], 280, place / "tokenizer.json")
    random = np.random.default_rng(0)
    weights = {
        name: random.normal(len(shape) == 1, 0.2, shape).astype(np.float32)
        for name, shape in MODEL.architecture.weight_shapes().items()
    }
    write_weights(place / "float", MODEL, weights, tokenizer=load_tokenizer(place / "tokenizer.json"))
    return place


def logits(directory, **options):
    """Of ``transformers``, for a fixed row of tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, **options)
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):  # kernels would be compiled for each shape
        return model(torch.arange(24)[None] * 37 % 280).logits.numpy(), model


@pytest.mark.parametrize("method", METHODS)
def test_written_codes_have_the_logits_of_what_we_read(method, base, tmp_path, monkeypatch):
    pytest.importorskip("gptqmodel")
    pytest.importorskip("optimum")
    monkeypatch.chdir(base)
    words = ["--group", "32", "--length", "32", "--samples", "4", *METHODS[method]]
    main(["quantize", "float", str(tmp_path / "codes"), *words])
    read = read_hugging_face(tmp_path / "codes", read_model_config(tmp_path / "codes"))
    floats = {name: np.asarray(weight) for name, weight in read.items()}
    write_weights(tmp_path / "floats", MODEL, floats, tokenizer=load_tokenizer(base / "tokenizer.json"))
    ours, _ = logits(tmp_path / "floats")
    before, _ = logits(base / "float")
    theirs, model = logits(tmp_path / "codes", device_map="cpu")
    assert type(model.model.layers[0].self_attn.q_proj).__name__ != "Linear"
    largest = np.abs(ours).max()
    np.testing.assert_allclose(theirs, ours, atol=0.01 * largest)
    assert np.abs(before - ours).max() > (0.0005 if "8 bits" in method else 0.02) * largest
