"""A changed run is written as what differs from the file it was read from, and loads wherever it is moved."""

from __future__ import annotations

import os
import shutil

import pytest

from mindllm.config import load_config, override_config, render_config
from mindllm.config.reading import shorten
from mindllm.config.reading.shipped import shipped_configs
from mindllm.config.reading.shorten import source_bases, write_short
from mindllm.errors import UserError

LLAMA = shipped_configs() / "llama2" / "pretrain_llama2_7b.yaml"
CHANGES = {
    "parallel_config.pipeline_stage": 4,
    "parallel_config.micro_batch_num": 16,
    "runner_config.gradient_accumulation_steps": 1,
}


def test_a_run_over_what_is_shipped_is_a_few_lines_and_may_be_moved(tmp_path):
    config = override_config(load_config(LLAMA), CHANGES)
    text = write_short(config, tmp_path / "new.yaml", source_bases(config))
    assert text.splitlines()[0] == "base: configs/llama2/pretrain_llama2_7b.yaml"
    assert len(text.splitlines()) <= 8
    (tmp_path / "elsewhere").mkdir()
    moved = shutil.move(tmp_path / "new.yaml", tmp_path / "elsewhere" / "moved.yaml")
    assert load_config(moved) == config


def test_it_loads_where_the_working_directory_has_such_a_file_too(tmp_path, monkeypatch):
    monkeypatch.chdir(shipped_configs().parent)
    (tmp_path / "run.yaml").write_text("base: configs/llama2/pretrain_llama2_7b.yaml\n", encoding="utf-8")
    assert load_config(tmp_path / "run.yaml") == load_config(LLAMA)


@pytest.fixture
def project(tmp_path):
    """A directory with a run of the user's, and that run with changes."""
    own = tmp_path / "project" / "runs" / "own.yaml"
    own.parent.mkdir(parents=True)
    own.write_text("base: configs/llama2/pretrain_llama2_7b.yaml\nseed: 3\n", encoding="utf-8")
    changes = {"model.model_config.offset": [1, -1, 0, 0], **CHANGES}
    return tmp_path / "project", override_config(load_config(own), changes)


@pytest.mark.parametrize(
    ("name", "base"),
    [("runs/new.yaml", "own.yaml"), ("new.yaml", "runs/own.yaml"), ("a/b/new.yaml", "../../runs/own.yaml")],
)
def test_a_run_over_a_file_of_the_user_moves_with_its_project(project, tmp_path, name, base):
    directory, config = project
    text = write_short(config, directory / name, source_bases(config))
    assert text.splitlines()[0] == f"base: {base}"
    assert "offset: [1, -1, 0, 0]" in text
    assert "seed" not in text
    shutil.move(directory, tmp_path / "moved")
    assert load_config(tmp_path / "moved" / name) == config


def test_a_base_behind_a_symbolic_link_is_found_by_both_names(project, tmp_path):
    directory, config = project
    (tmp_path / "far" / "away" / "deep").mkdir(parents=True)
    (directory / "link").symlink_to(tmp_path / "far" / "away" / "deep")
    text = write_short(config, directory / "link" / "new.yaml", source_bases(config))
    line = f"base: {directory.resolve()}/runs/own.yaml  # absolute: no relative path lasts from here"
    assert text.splitlines()[0] == line
    assert load_config(directory / "link" / "new.yaml") == load_config(tmp_path / "far/away/deep/new.yaml") == config
    (tmp_path / "other").symlink_to(directory)  # the link is around both
    text = write_short(config, tmp_path / "other" / "new.yaml", source_bases(config))
    assert text.splitlines()[0] == "base: runs/own.yaml"


def test_a_base_with_nothing_but_the_root_in_common_is_absolute(project, monkeypatch):
    directory, config = project
    monkeypatch.setattr(os.path, "commonpath", lambda paths: "/")
    text = write_short(config, directory / "new.yaml", source_bases(config))
    assert text.startswith(f"base: {directory.resolve()}/runs/own.yaml  # absolute")
    assert load_config(directory / "new.yaml") == config


def test_a_file_whose_unknown_keys_were_ignored_is_no_base(project):
    directory, _ = project
    newer = directory / "newer.yaml"
    newer.write_text("base: runs/own.yaml\nfuture: 1\n", encoding="utf-8")
    config = override_config(load_config(newer, ["--ignore-unknown-keys"]), CHANGES)
    text = write_short(config, directory / "new.yaml", source_bases(config))
    assert text.splitlines()[0] == "base: configs/llama2/pretrain_llama2_7b.yaml"
    assert load_config(directory / "new.yaml") == config


def test_a_base_beside_the_file_comes_first(tmp_path):
    beside = tmp_path / "configs" / "llama2"
    beside.mkdir(parents=True)
    (beside / LLAMA.name).write_text("not: a run\n", encoding="utf-8")
    (tmp_path / "run.yaml").write_text("base: configs/llama2/pretrain_llama2_7b.yaml\n", encoding="utf-8")
    with pytest.raises(UserError, match="not"):
        load_config(tmp_path / "run.yaml")


def test_a_base_that_is_nowhere_is_named_beside_the_file(tmp_path):
    (tmp_path / "run.yaml").write_text("base: configs/no_such.yaml\n", encoding="utf-8")
    with pytest.raises(UserError, match=str(tmp_path / "configs" / "no_such.yaml")):
        load_config(tmp_path / "run.yaml")


def test_a_run_written_over_the_file_it_was_read_from_is_not_based_on_itself(tmp_path):
    own = tmp_path / "own.yaml"
    own.write_text("base: configs/llama2/pretrain_llama2_7b.yaml\nseed: 3\n", encoding="utf-8")
    config = override_config(load_config(own), CHANGES)
    text = write_short(config, own, source_bases(config))
    assert text.splitlines()[0] == "base: configs/llama2/pretrain_llama2_7b.yaml"
    assert "seed: 3" in text
    assert load_config(own) == config


def test_a_run_written_over_what_its_file_is_based_on_takes_what_that_is_based_on(tmp_path):
    below, own = tmp_path / "below.yaml", tmp_path / "own.yaml"
    below.write_text("base: configs/llama2/pretrain_llama2_7b.yaml\nseed: 3\n", encoding="utf-8")
    own.write_text("base: below.yaml\nrunner_config: {batch_size: 2}\n", encoding="utf-8")
    config = override_config(load_config(own), CHANGES)
    assert (
        write_short(config, below, source_bases(config)).splitlines()[0]
        == "base: configs/llama2/pretrain_llama2_7b.yaml"
    )
    assert load_config(below) == config


def test_a_file_without_a_base_is_written_over_whole(tmp_path):
    own = tmp_path / "own.yaml"
    own.write_text(render_config(load_config(LLAMA)), encoding="utf-8")
    config = override_config(load_config(own), CHANGES)
    assert "base:" not in write_short(config, own, source_bases(config))
    assert load_config(own) == config


def test_what_would_not_load_again_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    own = tmp_path / "own.yaml"
    own.write_text("base: configs/llama2/pretrain_llama2_7b.yaml\n", encoding="utf-8")
    config = override_config(load_config(own), CHANGES)
    monkeypatch.setattr(shorten, "short_yaml", lambda *given: "base: configs/llama2/pretrain_llama2_7b.yaml\n")
    with pytest.raises(RuntimeError, match="would not have been"):
        write_short(config, own, source_bases(config))
    assert own.read_text(encoding="utf-8") == "base: configs/llama2/pretrain_llama2_7b.yaml\n"
    assert list(tmp_path.iterdir()) == [own]
