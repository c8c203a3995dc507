"""Every YAML in configs/ is loaded, counted, and checked against the published architecture."""

import csv
from pathlib import Path

import pytest

from mindllm.config import load_config, render_config
from mindllm.config.reading.shipped import shipped_models
from mindllm.errors import UserError

CONFIGS = Path(__file__).parents[2] / "configs"
BASES = CONFIGS / "base"
SHIPPED = sorted(path for path in CONFIGS.rglob("*.yaml") if BASES not in path.parents)

# Parameters, devices, norm epsilon, rotary base. Parameters are the published ones, not ours.
PUBLISHED = Path(__file__).with_name("shipped_models.csv")
EXPECTED = {
    row["file"]: (int(row["parameters"]), int(row["devices"]), float(row["rms_norm_eps"]), float(row["theta"]))
    for row in csv.DictReader(PUBLISHED.open())
} | {
    "pretrain_llama_7b": (6738415616, 8, 1e-6, 1e4),
    "pretrain_llama2_7b": (6738415616, 8, 1e-5, 1e4),
    "pretrain_llama2_7b_8p": (6738415616, 8, 1e-5, 1e4),
    "pretrain_llama2_7b_16p": (6738415616, 16, 1e-5, 1e4),
    "pretrain_llama2_7b_64p": (6738415616, 64, 1e-5, 1e4),
    "pretrain_llama2_13b_8p": (13015864320, 8, 1e-5, 1e4),
    "pretrain_llama2_13b_16p": (13015864320, 16, 1e-5, 1e4),
    "pretrain_llama2_13b_64p": (13015864320, 64, 1e-5, 1e4),
    "pretrain_llama2_70b_64p": (68976648192, 64, 1e-5, 1e4),
    "pretrain_llama2_13b": (13015864320, 16, 1e-5, 1e4),
    "pretrain_llama2_70b": (68976648192, 64, 1e-5, 1e4),
    "pretrain_llama3_8b": (8030261248, 8, 1e-5, 5e5),
    "pretrain_llama3_70b": (70553706496, 64, 1e-5, 5e5),
    "pretrain_llama2_tiny": (4999424, 1, 1e-5, 1e4),
    "finetune_llama2_tiny": (4999424, 1, 1e-5, 1e4),
    "finetune_llama2_tiny_lora": (4999424, 1, 1e-5, 1e4),
    "finetune_llama2_tiny_dpo": (4999424, 1, 1e-5, 1e4),
    "finetune_llama2_7b_lora": (6738415616, 8, 1e-5, 1e4),
    "finetune_llama3_8b": (8030261248, 8, 1e-5, 5e5),
}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_file_is_the_published_model(path):
    config = load_config(path)
    model = config.model.config
    facts = (model.base.parameter_count(), config.parallel_config.device_num, model.rms_norm_eps, model.theta)
    assert facts == EXPECTED[path.stem]
    assert (config.run_mode == "finetune") == path.stem.startswith("finetune_")
    assert config.trainer.model_name == path.stem.partition("_")[2]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_file_is_short_and_reads_back(path, tmp_path):
    assert len(path.read_text().splitlines()) <= 60
    config = load_config(path)
    rendered = tmp_path / "rendered.yaml"
    rendered.write_text(render_config(config))
    assert load_config(rendered) == config


def test_all_expected_files_are_there():
    assert {path.stem for path in SHIPPED} == set(EXPECTED)


def test_a_shipped_configuration_is_found_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = "configs/llama2/pretrain_llama2_tiny.yaml"
    assert load_config(path).model.config.hidden_size == load_config(CONFIGS.parent / path).model.config.hidden_size
    (tmp_path / "configs" / "llama2").mkdir(parents=True)
    (tmp_path / path).write_text("model: 3\n")
    with pytest.raises(UserError, match="model"):
        load_config(path)
    with pytest.raises(UserError, match=r"configs/llama2/none\.yaml: no such file"):
        load_config("configs/llama2/none.yaml")


def test_the_list_of_models_says_what_is_loaded():
    """``mindllm models`` parses the files another way; every YAML is in it once."""
    listed = {run.file: (model, run) for model in shipped_models() for run in model.runs}
    assert sorted(listed) == [path.relative_to(CONFIGS.parent).as_posix() for path in SHIPPED]
    for path in SHIPPED:
        model, run = listed[path.relative_to(CONFIGS.parent).as_posix()]
        assert (model.parameters, run.devices) == EXPECTED[path.stem][:2], path.stem
        assert run.run_mode == ("finetune" if path.stem.startswith("finetune") else "train")
        assert model.name in path.stem
    for file in ("configs/gemma/finetune_gemma2_9b.yaml", "configs/llama2/pretrain_llama2_7b_64p.yaml"):
        model, run = listed[file]
        loaded = load_config(CONFIGS.parent / file).model.config
        assert (run.seq_length, model.dtype) == (loaded.seq_length, loaded.compute_dtype)
        assert model.context == (loaded.max_position_embedding or loaded.seq_length)
    rows = (CONFIGS.parent / "docs" / "proven_configurations.md").read_text()
    for file, (_, run) in listed.items():
        assert ("proven_configurations.md" in run.docs) == (f"| `{file}` |" in rows)
