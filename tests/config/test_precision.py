"""What a run that only reads weights computes in on a CPU: float32 unless the user asks for another; training as written."""

import json

import pytest

from mindllm.config import load_config, on_this_device
from mindllm.config.reading.shipped import shipped_configs

KEY = "model.model_config.compute_dtype"
BASE = shipped_configs() / "base" / "pretrain.yaml"
RUN = """
use_parallel: false
processor: {tokenizer: {vocab_file: tokenizer.json}}
model: {model_config: {vocab_size: 96, hidden_size: 64, num_layers: 8, num_heads: 8, seq_length: 32}}
"""
OPTIONS = ["--run_mode=predict", "--context.device_target=CPU"]


def computed(path, *options):
    config, said = on_this_device(load_config(path, [*OPTIONS, *options]))
    return config.model.config.compute_dtype, said


@pytest.fixture
def over_shipped(write):
    assert "compute_dtype: bfloat16" in BASE.read_text()
    return write(f"base: {BASE}{RUN}")


@pytest.mark.parametrize("mode", ["predict", "chat", "eval"])
def test_the_type_of_a_shipped_base_is_nobodys_wish(over_shipped, mode):
    used, said = computed(over_shipped, f"--run_mode={mode}")
    assert used == "float32"
    assert said == f"computing in float32, which is faster on a CPU than bfloat16; --{KEY}=bfloat16 asks for that"


@pytest.mark.parametrize("option", [f"--{KEY}=bfloat16", "--model={model_config: {compute_dtype: bfloat16}}"])
def test_an_option_is_a_wish_and_its_price_is_said(over_shipped, option):
    used, said = computed(over_shipped, option)
    assert used == "bfloat16"
    assert said == (
        f"{option}: compute_dtype bfloat16 is slow on a CPU, which has few kernels for it; --{KEY}=float32 is faster"
    )


def test_so_is_what_the_user_writes_in_his_file_or_his_own_base(write):
    written = write(f"base: {BASE}{RUN.replace('seq_length', 'compute_dtype: bfloat16, seq_length')}", "mine.yaml")
    over = write("base: mine.yaml\n", "over.yaml")
    for path in (written, over):
        used, said = computed(path)
        assert used == "bfloat16"
        assert said.startswith(f"{written}:")


def test_other_types_follow(over_shipped):
    config = load_config(over_shipped, [*OPTIONS, "--model.model_config.softmax_compute_type=float16"])
    config, said = on_this_device(config)
    assert (config.model.config.compute_dtype, config.model.config.softmax_compute_type) == ("float32", "float16")
    assert "softmax_compute_type float16 is slow" in said


@pytest.mark.parametrize("option", ["--run_mode=train", "--context.device_target=Ascend"])
def test_training_and_devices_compute_as_written(over_shipped, option):
    assert computed(over_shipped, "--lr_schedule.learning_rate=1e-3", option) == ("bfloat16", "")


def test_the_type_of_the_files_of_weights_is_none_to_compute_in(write, tmp_path):
    model = tmp_path / "llama"
    model.mkdir()
    sizes = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8}
    sizes |= {"intermediate_size": 96, "rms_norm_eps": 1e-6, "max_position_embeddings": 64}
    described = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16"} | sizes
    (model / "config.json").write_text(json.dumps(described))
    (model / "tokenizer.json").write_text("{}")
    path = write(f"load_checkpoint: {model}\ninput_data: a\n")
    assert computed(path) == ("float32", "")
    path = write(f"base: {BASE}\nuse_parallel: false\nload_checkpoint: {model}\ninput_data: a\n")
    used, said = computed(path)
    assert used == "float32"
    assert "asks for that" in said
