"""A YAML of MindFormers that leaves its architecture to a directory of Hugging Face which is not there yet."""

import json
import logging

import pytest
import yaml
from tiny_families import TINY

from mindllm.config import load_config
from mindllm.config.model import ModelConfig
from mindllm.config.reading.load import read_file
from mindllm.config.reading.shipped import shipped_configs
from mindllm.errors import UserError
from mindllm.families import BY_TYPE
from mindllm.mindformers.directory import PUBLISHED
from mindllm.mindformers.reader import convert
from tests.mindformers.mindformers_files import MCORE, writer

MODEL = "model.model_config"
KEPT = ("compute_dtype", "params_dtype", "seq_length", "offset")
MODEL_LEFT_OUT = {"model": {"model_config": {key: MCORE["model"]["model_config"][key] for key in KEPT}}}
CONVERSATIONS = {
    "data_loader": {
        "type": "HFDataLoader",
        "path": "json",
        "data_files": "talk.json",
        "handler": [{"type": "AlpacaInstructDataHandler", "seq_length": 4096}],
    }
}


@pytest.fixture
def theirs(tmp_path):
    """Writes a file that names a directory of weights and no architecture."""

    def write(directory, changes=None):
        tree = {**MCORE, **MODEL_LEFT_OUT, "pretrained_model_dir": str(directory)}
        return writer(tmp_path)(tree, changes)

    return write


def test_the_architecture_of_a_shipped_yaml_stands_in(theirs, caplog):
    path = theirs("/path/to/Qwen3-32B", {f"{MODEL}.num_hidden_layers": 8})
    with caplog.at_level(logging.WARNING):
        config = load_config(path)
    model = config.model.config
    assert (model.model_type, model.hidden_size, model.num_heads, model.qk_layernorm) == ("qwen3", 5120, 64, True)
    assert model.num_layers == 8  # what the YAML says itself wins
    assert config.pretrained_model_dir == "/path/to/Qwen3-32B"
    assert "configs/qwen3/pretrain_qwen3_32b.yaml stands in until the directory is there" in caplog.text
    reasons = {entry.key: entry.reason for entry in convert(read_file(path)).entries}
    assert "stands in" in reasons["pretrained_model_dir"]


def test_the_tokenizer_is_expected_in_the_directory(theirs):
    changes = {"train_dataset": CONVERSATIONS, "train_dataset_task": ...}
    config = load_config(theirs("/path/to/Qwen3-8B", changes))
    assert config.processor.tokenizer.vocab_file == "/path/to/Qwen3-8B/tokenizer.json"


@pytest.mark.parametrize("name", ["path/to/model_dir", "/path/to/Qwen3-33B"])
def test_a_directory_of_no_known_model_gives_nothing(theirs, name):
    with pytest.raises(UserError, match=r"pretrained_model_dir: does not exist"):
        load_config(theirs(name))


def test_a_directory_that_is_there_is_read_instead(theirs, tmp_path):
    directory = tmp_path / "Qwen3-32B"
    directory.mkdir()
    content = {**TINY["qwen3"], "model_type": "qwen3", "vocab_size": 96}
    (directory / "config.json").write_text(json.dumps(content), encoding="utf-8")
    model = load_config(
        theirs(directory, {f"{MODEL}.seq_length": 32, "train_dataset.data_loader.config.seq_length": 32})
    ).model.config
    assert model.hidden_size == content["hidden_size"]


def test_keys_of_experts_count_where_the_directory_has_experts(theirs):
    path = theirs(
        "/path/to/Qwen3-30B-A3B", {f"{MODEL}.moe_aux_loss_coeff": 0.002, "parallel_config.expert_parallel": 2}
    )
    config = load_config(path)
    assert config.model.config.aux_loss_factors == (0.002,)
    assert config.parallel_config.expert_tensor_parallel == 1  # an expert of mcore networks is whole on its device
    dense = theirs("/path/to/Qwen3-8B", {f"{MODEL}.moe_aux_loss_coeff": 0.002})
    reasons = {entry.key: entry.reason for entry in convert(read_file(dense)).entries}
    assert reasons[f"{MODEL}.moe_aux_loss_coeff"] == "the model has no experts"


def test_layers_that_predict_ahead_are_not_dropped_in_silence(theirs):
    path = theirs("/path/to/DeepSeek-V3", {"parallel_config.pipeline_stage": 1, "parallel_config.micro_batch_num": 1})
    option = f"--{MODEL}.num_nextn_predict_layers=0"
    assert load_config(path, [option]).model.config.expert_num == 256
    if "num_nextn_predict_layers" in ModelConfig.model_fields:
        assert load_config(path).model.config.num_nextn_predict_layers == 1
    else:
        with pytest.raises(UserError, match=option):
            load_config(path)


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_stands_in_is_shipped(name):
    text = (shipped_configs() / f"{PUBLISHED[name]}.yaml").read_text(encoding="utf-8")
    family = yaml.safe_load(text)["model"]["model_config"]["model_type"]
    size = name.rpartition("-")[2].lower().replace(".", "_")
    assert family in BY_TYPE
    assert (
        name.startswith("DeepSeek") or name.split("-")[1].lower().replace(".", "_") in PUBLISHED[name] or size in text
    )
