"""docs/errors.md: its commands end with 2 and print what stands there; the fields of its table are those of a problem."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from markdown_pages import ROOT, blocks

from mindllm import UserError, load_config
from mindllm.command import run_command
from mindllm.main import main

LLAMA = "configs/llama2/pretrain_llama2_7b.yaml"
PAGE = ROOT / "docs" / "errors.md"
WRONG, SHOWN, IGNORED = blocks(PAGE)
CALLS = re.findall(r"^\$ (.*)\n((?:[^$].*\n)+)", SHOWN.text, re.MULTILINE)


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "wrong.yaml").write_text(WRONG.text, encoding="utf-8")
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("command", "shown"), CALLS, ids=[command for command, _ in CALLS])
def test_a_mistake_is_told_as_the_page_shows(here, capsys, command, shown):
    with pytest.raises(SystemExit) as left:
        run_command(main, shlex.split(command)[1:])
    assert left.value.code == 2
    assert capsys.readouterr().err == shown


def test_a_problem_has_the_fields_of_the_table(here):
    with pytest.raises(UserError) as raised:
        load_config("wrong.yaml")
    first = raised.value.problems[0]
    rows = re.findall(r"^\| (`[a-z`, ]*) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert re.findall(r"\w+", " ".join(rows)) == ["file", "line", "option", "key", "value", "reason", "advice"]
    assert (first.file, first.line, first.key, first.value) == ("wrong.yaml", 5, "runner_config.batch_size", "many")
    assert (first.option, first.reason, first.advice) == ("", "must be an integer", "")


def test_an_unknown_key_is_ignored_as_the_page_shows(here, caplog):
    command, shown = IGNORED.text.splitlines()
    _, _, _, name, option = shlex.split(command)
    Path(name).write_text(f"base: {LLAMA}\nparallel_config:\n  enable_fa_var_len: true\n", encoding="utf-8")
    assert load_config(name, [option]) == load_config(LLAMA)
    assert [record.message for record in caplog.records] == [shown]
