"""mindllm weights: there and back through the command line, mistakes told, memory of a tensor and not of a model."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mindllm.cli.weights import main
from mindllm.command import run_command
from mindllm.config import ModelConfig
from mindllm.data.tokenizers.sentencepiece_tokenizer import save_tokenizer, train_byte_level_bpe
from mindllm.files import size_in_bytes
from mindllm.train.checkpoint import CheckpointStore, RankTensors, load_checkpoint
from mindllm.weight_files import write_weights

ROOT = Path(__file__).parents[2]
MODEL = ModelConfig(
    vocab_size=280, hidden_size=8, num_layers=2, num_heads=2, n_kv_heads=1, intermediate_size=12, seq_length=16
)


def run(*arguments, expect=0):
    command = [sys.executable, "-m", "mindllm.main", "weights", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert result.returncode == expect, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    return result.stdout + result.stderr


@pytest.fixture
def directory(tmp_path):
    """A Hugging Face directory of random weights with a tokenizer."""
    random = np.random.default_rng(0)
    weights = {
        name: random.normal(size=shape).astype(np.float32) for name, shape in MODEL.architecture.weight_shapes().items()
    }
    path = write_weights(tmp_path / "hf", MODEL, weights, max_shard_bytes=4000)
    save_tokenizer(train_byte_level_bpe(["def main(): return main() def main(): return"], 262), path / "tokenizer.json")
    return path


def files(path):
    return {file.name: file.read_bytes() for file in path.iterdir()}


def test_there_and_back_through_the_command_line(directory, tmp_path):
    assert run("import", directory, tmp_path / "checkpoint") == f"wrote {tmp_path}/checkpoint/llm-0\n"
    assert load_checkpoint(tmp_path / "checkpoint" / "llm-0").step == 0
    run("export", tmp_path / "checkpoint" / "llm-0", tmp_path / "back", "--max_shard_size", "4KB")
    back, first = files(tmp_path / "back"), files(directory)
    assert json.loads(back.pop("tokenizer_config.json"))["eos_token"] == "<|endoftext|>"
    for name in ("config.json", "generation_config.json"):  # the tokenizer names the end of a text now
        assert json.loads(back.pop(name)) == {**json.loads(first.pop(name)), "eos_token_id": 0}
    assert back == first


def test_info_of_both_kinds(directory, tmp_path, capsys):
    main(["import", str(directory), str(tmp_path / "checkpoint"), "--json"])
    written = json.loads(capsys.readouterr().out)["written"]
    for path, kind in ((directory, "Hugging Face directory"), (written, "checkpoint of step 0")):
        main(["info", str(path), "--json"])
        told = json.loads(capsys.readouterr().out)
        assert (told["kind"], told["parameters"]) == (kind, MODEL.parameter_count())
        assert (told["tokenizer_vocab_size"], told["tensors"]) == (262, {"float32": 21})
    main(["info", str(directory)])
    assert "Hugging Face directory" in capsys.readouterr().out


def test_export_in_half_precision_with_another_tokenizer(directory, tmp_path, capsys):
    save_tokenizer(train_byte_level_bpe(["abc abc"], 258), tmp_path / "small.json")
    main(["import", str(directory), str(tmp_path)])
    options = ["--dtype", "bfloat16", "--tokenizer", str(tmp_path / "small.json")]
    main(["export", str(tmp_path / "llm-0"), str(tmp_path / "half"), *options])
    assert json.loads((tmp_path / "half" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert (tmp_path / "half" / "tokenizer.json").read_bytes() == (tmp_path / "small.json").read_bytes()
    tensors = load_file(tmp_path / "half" / "model.safetensors")
    assert {tensor.dtype.name for tensor in tensors.values()} == {"bfloat16"}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["import", "nowhere", "out"],
            "nor weights of MindFormers (.ckpt, .safetensors, rank_0)",
        ),
        (["import", "DIRECTORY", "TMP/full"], "llm-0: exists already"),
        (["export", "nowhere", "out"], "CHECKPOINT=nowhere does not exist"),
        (["export", "TMP/full", "out"], "contains checkpoints; pass one of them"),
        (["export", "TMP/full/llm-0", "DIRECTORY"], "exists already"),
        (["export", "TMP/full/llm-0", "out"], "the architecture (identity.model.config) is missing"),
        (["export", "TMP/good/llm-0", "out", "--max_shard_size", "5"], "5 is not a size such as 5GB"),
        (["export", "TMP/good/llm-0", "out", "--dtype", "int8"], "invalid choice"),
        (["export", "TMP/good/llm-0", "out", "--tokenizer", "TMP/big.json"], "has 290 tokens, more than the 280"),
        (["info", "TMP"], "manifest.json is missing"),
        ([], "required: COMMAND"),
    ],
)
def test_mistakes_end_with_2_and_leave_nothing(directory, tmp_path, arguments, says, capsys):
    CheckpointStore(tmp_path / "full").save(0, {0: RankTensors({"w": np.zeros(1)}, {})}, {})
    main(["import", str(directory), str(tmp_path / "good")])
    texts = [f"def f{i % 7}(x):\n    return x + {i}\n" for i in range(200)]
    save_tokenizer(train_byte_level_bpe(texts, 290), tmp_path / "big.json")
    before = sorted(tmp_path.rglob("*"))
    given = [text.replace("DIRECTORY", str(directory)).replace("TMP", str(tmp_path)) for text in arguments]
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        run_command(main, given)
    assert ended.value.code == 2
    assert says in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before
    assert not Path("out").exists()


def test_an_import_onto_a_full_disk_leaves_no_directory(directory, tmp_path, monkeypatch, capsys):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(CheckpointStore, "_write_and_publish", full)
    with pytest.raises(SystemExit) as ended:
        run_command(main, ["import", str(directory), str(tmp_path / "new")])
    assert ended.value.code == 1
    assert "No space left" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


MEASURE = """
import re, sys
from pathlib import Path
from mindllm.cli.weights import main
import mindllm.weight_files.convert

def kilobytes(key):
    return int(re.search(key + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
before = kilobytes("VmRSS")
main(sys.argv[1:])
print(kilobytes("VmHWM") - before)
"""


def growth(*arguments):
    """Megabytes that converting needs at its peak beyond what the process had."""
    command = [sys.executable, "-c", MEASURE, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    printed = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=True).stdout
    return int(printed.splitlines()[-1]) / 1024


def test_memory_of_converting_is_that_of_a_few_tensors(tmp_path):
    shape = {"vocab_size": 8000, "hidden_size": 1024, "num_layers": 6, "num_heads": 8, "intermediate_size": 2816}
    model = ModelConfig(**shape, seq_length=16)  # 370 MB, 33 the largest tensor
    weights = {name: np.full(shape, 0.5, np.float32) for name, shape in model.architecture.weight_shapes().items()}
    assert sum(array.nbytes for array in weights.values()) > 300e6
    write_weights(tmp_path / "hf", model, weights)
    assert 20 < growth("import", tmp_path / "hf", tmp_path) < 150
    assert 20 < growth("export", tmp_path / "llm-0", tmp_path / "half", "--dtype", "bfloat16") < 150


@pytest.mark.parametrize(("text", "size"), [("5GB", 5 * 10**9), ("1.5MB", 1_500_000), ("200KB", 200_000)])
def test_sizes(text, size):
    assert size_in_bytes(text) == size


@pytest.mark.parametrize("text", ["0GB", "5", "GB", "-1GB", "5GiB", "5 GB", ""])
def test_what_is_no_size(text):
    with pytest.raises(ValueError, match="is not a size such as 5GB"):
        size_in_bytes(text)


def test_weights_of_mindformers_with_the_architecture_named(directory, tmp_path, capsys):
    random = np.random.default_rng(0)
    weights = {
        name: random.normal(size=shape).astype(np.float32) for name, shape in MODEL.architecture.weight_shapes().items()
    }
    save_file({**weights, "global_step": np.zeros(1, np.int32)}, tmp_path / "llama-1_2.safetensors")
    main(["info", str(tmp_path / "llama-1_2.safetensors"), "--json"])
    told = json.loads(capsys.readouterr().out)
    assert (told["kind"], told["files"]) == ("weights of MindFormers", ["llama-1_2.safetensors"])
    assert told["parameters"] == MODEL.parameter_count() + 1
    main(["import", str(tmp_path / "llama-1_2.safetensors"), str(tmp_path / "ours"), "--model", str(directory)])
    loaded = load_checkpoint(tmp_path / "ours" / "llm-0")
    assert all(np.array_equal(loaded.weights[name], values) for name, values in weights.items())
    assert loaded.state["tokenizer"] == str(directory / "tokenizer.json")


def test_mistakes_about_the_architecture(directory, tmp_path):
    save_file({"a": np.zeros(3, np.float32)}, tmp_path / "a.safetensors")
    printed = run("import", tmp_path / "a.safetensors", tmp_path / "ours", expect=2)
    assert "do not define their architecture; add --model RUN.yaml" in printed
    assert "has its own config.json" in run("import", directory, tmp_path / "ours", "--model", directory, expect=2)
    assert not (tmp_path / "ours").exists()
