"""mindllm models: what ships, what directories hold, and how soon it is said."""

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from mindllm.cli.models import main
from mindllm.command import run_command
from mindllm.config import ModelConfig
from mindllm.train.checkpoint import CheckpointStore, RankTensors
from mindllm.weight_files import write_weights

ROOT = Path(__file__).parents[3]
MODEL = ModelConfig(vocab_size=64, hidden_size=8, num_layers=1, num_heads=2, intermediate_size=16, seq_length=16)


def said(capsys, *arguments):
    assert main([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_words_choose_models_by_family_and_name(capsys):
    told = said(capsys, "llama3_8b")
    (model,) = told["models"]
    assert (told["schema"], told["directories"]) == (1, [])
    assert (model["family"], model["parameters"], model["dtype"]) == ("llama3", 8030261248, "bfloat16")
    assert [run["file"] for run in model["runs"]] == [
        f"configs/llama3/{mode}_llama3_8b.yaml" for mode in ("pretrain", "finetune")
    ]
    assert {run["devices"] for run in model["runs"]} == {8}
    assert "proven_configurations.md" in model["runs"][0]["docs"]
    assert {model["family"] for model in said(capsys, "yi", "GPT2")["models"]} == {"yi", "gpt2"}
    assert len(said(capsys)["models"]) > 50


def test_the_table_shows_them(capsys):
    assert main(["llama2_70b"]) == 0
    out = capsys.readouterr().out
    for word in ("llama2_70b", "69B", "4096", "64", "pretrain_llama2_70b_64p.yaml", "proven_configurations.md"):
        assert word in out


def test_an_unknown_name_is_a_mistake(capsys):
    with pytest.raises(SystemExit) as left:
        run_command(main, ["lamma3"])
    assert left.value.code == 2
    assert "unknown model or directory; similar: llama3, llama, " in capsys.readouterr().err


def random_weights(directory):
    import numpy as np

    weights = {name: np.ones(shape, np.float32) for name, shape in MODEL.architecture.weight_shapes().items()}
    write_weights(directory, MODEL, weights)
    return weights


def test_a_directory_lists_the_models_in_it(tmp_path, capsys):
    weights = random_weights(tmp_path / "org" / "small")
    state = {"step": 7, "identity": {"model": {"config": MODEL.model_dump(mode="json")}}}
    CheckpointStore(tmp_path / "run", keep_checkpoint_max=2).save(7, {0: RankTensors(weights, {})}, state)
    (tmp_path / "adapter").mkdir()
    adapter = {"peft_type": "LORA", "base_model_name_or_path": "org/small"}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(adapter))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    found = {Path(entry["path"]).name: entry for entry in said(capsys, tmp_path)["directories"]}
    assert {name: entry["kind"] for name, entry in found.items()} == {
        "small": "Hugging Face directory", "llm-7": "checkpoint", "adapter": "adapter", "broken": "Hugging Face directory",
    }  # fmt: skip
    parameters = MODEL.parameter_count()
    small, checkpoint = found["small"], found["llm-7"]
    assert (small["parameters"], small["family"], small["dtype"], small["tokenizer"]) == (
        parameters,
        "llama",
        "float32",
        False,
    )
    assert small["bytes"] >= 4 * parameters
    assert (checkpoint["parameters"], checkpoint["step"]) == (parameters, 7)
    assert (found["adapter"]["base"], found["adapter"]["tuner"]) == ("org/small", "LORA")
    assert "not JSON" in found["broken"]["error"]
    assert main([str(tmp_path)]) == 0
    assert "LORA of org/small" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("made", [True, False])
def test_a_directory_without_models_is_a_mistake(made, tmp_path, capsys):
    if made:
        (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit) as left:
        run_command(main, [str(tmp_path / "empty")])
    assert left.value.code == 2
    assert ("contains no model" if made else "no such directory") in capsys.readouterr().err


def test_it_takes_a_second_and_no_mindspore():
    program = (
        "import sys; from mindllm.cli.models import main; main([]);assert not {'mindspore', 'torch'} & {*sys.modules}"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2
