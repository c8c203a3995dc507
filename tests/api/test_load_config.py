"""A run comes from a YAML, a dictionary, a Hugging Face directory, a YAML of MindFormers, or another run."""

import json

import pytest
import yaml
from run_fixtures import MINIMAL

from mindllm import load_config
from mindllm.errors import UserError
from tests.mindformers.mindformers_files import LEGACY, writer

LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
}  # fmt: skip


def test_a_dictionary_over_a_base_is_the_yaml_over_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("base: base.yaml\nseed: 7\n")
    (tmp_path / "base.yaml").write_text(json.dumps(MINIMAL))
    given = {"base": "base.yaml", "seed": 7}
    assert load_config(given) == load_config("run.yaml")
    assert given == {"base": "base.yaml", "seed": 7}


def test_a_dictionary_may_have_a_shipped_base_and_tuples(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    base = {"base": "configs/llama2/pretrain_llama2_7b.yaml", "optimizer": {"betas": (0.9, 0.99)}}
    assert load_config(base).optimizer.betas == (0.9, 0.99)


def test_a_dictionary_with_another_key_than_a_word_is_refused():
    with pytest.raises(UserError, match=r"the dictionary: 1: a key must be a word"):
        load_config({**MINIMAL, "optimizer": {1: 2}})


def test_a_dictionary_of_mindformers_is_read_as_its_yaml(tmp_path, caplog):
    path = writer(tmp_path)(LEGACY, {})
    assert load_config(yaml.safe_load(path.read_text())) == load_config(path)
    assert "the dictionary: MindFormers YAML (" in caplog.text


def test_a_hugging_face_directory_is_a_run_over_the_base(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    run = load_config(tmp_path, {"context.max_device_memory": "32GB"})
    assert (run.run_mode, run.load_checkpoint) == ("finetune", str(tmp_path))
    assert (run.model.config.hidden_size, run.model.config.num_layers) == (64, 2)
    assert run.optimizer.betas == load_config("configs/llama2/pretrain_llama2_7b.yaml").optimizer.betas
    assert load_config(str(tmp_path), {"context.max_device_memory": "32GB"}) == run


def test_a_directory_without_a_model_cannot_be_read(tmp_path):
    with pytest.raises(UserError, match="is a directory, not a file, and holds neither a YAML nor a model"):
        load_config(tmp_path)


def test_a_run_is_itself_and_overrides_change_it():
    run = load_config(MINIMAL)
    assert load_config(run) is run
    assert load_config(run, {"seed": 9}).seed == 9
