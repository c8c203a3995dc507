"""``mindllm weights quantize``: two readers read what is written, and what cannot be meant is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
import quantized_files as files
from safetensors.numpy import load_file
from tiny_quantized import MODEL, random_weights

from mindllm.cli.weights import main
from mindllm.command import run_command
from mindllm.config import read_model_config
from mindllm.data import load_tokenizer
from mindllm.data.tokenizers.sentencepiece_tokenizer import train_tokenizer
from mindllm.weight_files import read_hugging_face, write_weights

TEXT = "def add(first, second):\n    return first + second\n\n\n" * 60


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A model of many tokens with its tokenizer, and a text."""
    place = tmp_path_factory.mktemp("base")
    (place / "text.txt").write_text(TEXT)
    train_tokenizer([TEXT], 280, place / "tokenizer.json")
    model = MODEL.model_copy(update={"vocab_size": 280})
    weights = random_weights(model)
    write_weights(place / "float", model, weights, tokenizer=load_tokenizer(place / "tokenizer.json"))
    return place


def tool(*arguments):
    """The exit code."""
    with pytest.raises(SystemExit) as ended:
        run_command(main, [str(argument) for argument in arguments])
    return ended.value.code or 0


def unpacked_gptq(tensors, name, bits):
    """By single codes: another reader of the files, as their kernels do it."""
    parts = {part: tensors[f"{name}.{part}"] for part in ("qweight", "qzeros", "scales", "g_idx")}
    words, out = parts["qweight"].shape
    count, mask = 32 // bits, 2**bits - 1
    values = np.empty((out, words * count), np.float32)
    for column in range(words * count):
        group = parts["g_idx"][column]
        code = (parts["qweight"][column // count].astype(np.int64) >> bits * (column % count)) & mask
        stored = np.repeat(parts["qzeros"][group].astype(np.int64), count) >> bits * (np.arange(out) % count)
        values[:, column] = (code - ((stored & mask) + 1)) * parts["scales"][group].astype(np.float32)
    return values


def unpacked_awq(tensors, name, group):
    codes, zeros = tensors[f"{name}.qweight"], tensors[f"{name}.qzeros"]

    def rows(packed):
        found = np.empty((len(packed), packed.shape[1] * 8), np.int64)
        for place, row in enumerate(files.AWQ_ROWS):
            found[:, row::8] = (packed.astype(np.int64) >> 4 * place) & 15
        return found

    spread = [np.repeat(array, group, 0) for array in (rows(zeros), tensors[f"{name}.scales"].astype(np.float32))]
    return ((rows(codes) - spread[0]) * spread[1]).T


METHODS = {
    "rtn, 4 bits": ("--method", "rtn"),
    "rtn, 8 bits": ("--method", "rtn", "--bits", "8"),
    "gptq": ("--method", "gptq", "--calibration"),
    "gptq, act order": ("--method", "gptq", "--act-order", "--calibration"),
    "awq": ("--method", "awq", "--calibration"),
}


@pytest.mark.parametrize("method", METHODS)
def test_what_is_written_is_read_by_two_readers(method, base, tmp_path):
    words = [*METHODS[method], *([base / "text.txt"] if "--calibration" in METHODS[method] else [])]
    target = tmp_path / "codes"
    assert tool("quantize", base / "float", target, "--group", "16", "--length", "16", "--samples", "4", *words) == 0
    model = read_model_config(target)
    bits = 8 if "8" in words else 4
    assert model.quantization_config.code == f"uint{bits}"
    assert model.quantization_config.act_order == (method == "gptq, act order")
    weights = {name: np.asarray(item) for name, item in read_hugging_face(target, model).items()}
    tensors = load_file(target / "model.safetensors")
    for theirs, ours in (("self_attn.q_proj", "attention.wq"), ("mlp.down_proj", "feed_forward.w2")):
        name = f"model.layers.1.{theirs}"
        values = unpacked_awq(tensors, name, 16) if method == "awq" else unpacked_gptq(tensors, name, bits)
        np.testing.assert_allclose(weights[f"model.layers.1.{ours}.weight"], values, atol=1e-6)
    plain = {name: np.asarray(item) for name, item in read_hugging_face(base / "float", model).items()}
    largest = 0.01 if bits == 8 else 0.5
    differences = [np.abs(weights[name] - plain[name]).max() for name in plain if "w2" in name]
    assert method == "awq" or 0 < max(differences) < largest
    config = json.loads((target / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == ("awq" if method == "awq" else "gptq")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--method", "gptq"), "--method gptq requires a calibration text; add --calibration FILE"),
        (("--method", "rtn", "--group", "64"), "has 32 columns, which is not a multiple; use --group 32"),
        (("--method", "awq", "--bits", "8"), "AWQ's files have 4 bits"),
        (("--method", "rtn", "--act-order"), "only GPTQ orders columns"),
        (("--group", "16", "--calibration", "nowhere.txt"), "is not a readable text"),
    ],
)
def test_what_cannot_be_meant_is_one_line_and_writes_nothing(words, message, base, tmp_path, capsys):
    assert tool("quantize", base / "float", tmp_path / "codes", *words) == 2
    said = capsys.readouterr().err
    assert message in " ".join(said.split())
    assert not list(tmp_path.iterdir())
