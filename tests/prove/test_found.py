"""The proof of a configuration, found again, and the line that a run begins with."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from run_fixtures import MINIMAL

from mindllm.config import load_config, override_config
from mindllm.errors import UserError
from mindllm.prove import found
from mindllm.prove.answers import Standing
from mindllm.prove.found import find_proof, hash_of, line_about, read_proof, remember, versions_here
from mindllm.prove.questions import DATA, MEMORY, PARITY
from tests.prove.made_proofs import proof


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")


@pytest.fixture
def run(tmp_path):
    """Returns the smallest run, read from a file."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "run.yaml").write_text(yaml.safe_dump(MINIMAL))
    return lambda *overrides: load_config(tmp_path / "runs" / "run.yaml", overrides)


def made(config, *changed, **options):
    """Return a proof of a configuration by the software that is here."""
    of = proof(*changed, config_hash=hash_of(config), **options)
    return replace(of, run=replace(of.run, versions=versions_here()))


def put(of, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(of.to_dict()))


@pytest.mark.parametrize(
    "place",
    [
        "runs/proof/proof.json",
        "runs/proof.json",
        "runs/proof/run/proof.json",
        "cwd/proof/proof.json",
        "cwd/proof/a/proof.json",
    ],
)
def test_it_lies_beside_the_yaml_or_where_the_command_is_called(run, tmp_path, place):
    put(made(run()), tmp_path / place)
    assert find_proof(run()).run.hash == hash_of(run())
    assert find_proof(run("--seed=7")) is None


def test_it_is_in_the_cache_of_the_user(run):
    remember(made(run()))
    assert find_proof(run()).complete


def test_a_complete_one_is_preferred_to_a_quick_one(run, tmp_path):
    put(made(run(), complete=False), tmp_path / "cwd/proof/proof.json")
    assert not find_proof(run()).complete
    remember(made(run()))
    assert find_proof(run()).complete


SAVED = {"type": "CheckpointMonitor", "save_checkpoint_steps": 5}


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({"output_dir": "elsewhere", "overwrite": True, "resume_training": "auto", "require_proof": True}, True),
        ({"runner_config.stop_step": 3}, True),
        ({"run_mode": "finetune"}, True),
        ({"run_mode": "eval"}, False),
        ({"callbacks": [SAVED, {"type": "MetricsMonitor"}, {"type": "NaNMonitor"}]}, True),
        ({"callbacks": [SAVED | {"keep_checkpoint_max": 9}]}, False),
        ({"runner_config.batch_size": 4}, False),
        ({"train_dataset.data_loader.config.data_path": "elsewhere"}, False),
    ],
)
def test_it_is_of_all_that_an_answer_depends_on(run, changes, same):
    config = override_config(run("--load_checkpoint=weights"), {"callbacks": [SAVED]})
    assert (hash_of(override_config(config, changes)) == hash_of(config)) is same


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        "{}",
        '{"schema": 1}',
        '{"schema": 2}',
        "[" * 100_000,
        '{"schema": 1, "run": {}, "answers": [], "allowed": [], "seconds": 0, "complete": true, "device": ""}',
        "\x00",
    ],
)
def test_what_is_no_proof_is_passed_over(run, tmp_path, text):
    file = tmp_path / "runs/proof/proof.json"
    file.parent.mkdir()
    file.write_text(text)
    with pytest.raises(UserError, match=r"proof\.json: (not a proof|has schema 2)"):
        read_proof(file)
    assert find_proof(run()) is None
    remember(made(run()))
    assert find_proof(run()).complete


def test_a_proof_without_a_question_is_none(run, tmp_path):
    tree = made(run()).to_dict()
    del tree["answers"][3]
    (tmp_path / "proof.json").write_text(json.dumps(tree))
    with pytest.raises(UserError, match="its questions are not those of this version"):
        read_proof(tmp_path)


def test_the_line_of_a_run(run):
    config = run()
    command = f"mindllm prove {config.source}"
    ready = "proved 2026-11-20: fits 41.4 of 58 GB, 30.4 s a step expected"
    assert line_about(config, made(config)) == ready
    assert line_about(config, made(config, {DATA: Standing.NOT_PROVED}, allowed=(DATA,))) == (
        f"{ready}, without a proof of data"
    )
    assert line_about(config, None) == f"not proved; {command}"
    assert line_about(config, made(config, complete=False)) == f"not proved; {command}"
    refuted = made(config, {MEMORY: Standing.REFUTED, PARITY: Standing.REFUTED, DATA: Standing.NOT_PROVED})
    assert line_about(config, refuted) == f"refuted 2026-11-20: memory, parity; {command}"
    assert line_about(config, made(config, {DATA: Standing.NOT_PROVED})) == f"not proved 2026-11-20: data; {command}"


def test_a_proof_by_other_software_is_told(run, monkeypatch):
    config = run()
    before = made(config)
    monkeypatch.setattr(found, "versions_here", lambda: {**before.run.versions, "mindspore": "2.11.0"})
    command = f"mindllm prove {config.source}"
    version = before.run.versions["mindspore"]
    assert line_about(config, before) == (
        f"proved 2026-11-20 by other software (mindspore {version}, here 2.11.0); {command}"
    )


def test_the_command_has_the_keys_that_options_have_changed(run):
    config = run(
        "--batch_size", "4", "--run_mode=train", "--runner_config.train_steps=7", "--output_dir", "a", "--overwrite"
    )
    assert line_about(config, None) == (
        f"not proved; mindllm prove {config.source} --batch_size 4 --runner_config.train_steps=7"
    )
