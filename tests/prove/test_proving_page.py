"""docs/proving.md and docs/proof_json.md: the questions, every key of proof.json, commands that parse, and CI that works."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import yaml
from dry_run_cases import FormulaSimulations, pipeline
from small_cluster import cluster_run

import mindllm
from mindllm.cli.prove import make_parser
from mindllm.compiled.inspect.recompute import Effect
from mindllm.dry_run.run import simulate
from mindllm.prove.checks import ranks, stages, step_time
from mindllm.prove.junit import outcome
from mindllm.prove.pieces import Options
from mindllm.prove.proof import Proof
from mindllm.prove.questions import DATA, MEMORY, QUESTIONS, STEP_TIME
from mindllm.terminal.progress import unwatched
from mindllm.verify.outcome import Outcome
from mindllm.verify.verification import Verification

ROOT = Path(__file__).parents[2]
PAGE = "\n".join((ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in ("proving", "proof_json"))
CI = ROOT / "examples" / "ci"
SCRIPT = CI / "prove_changed.sh"
FILES = {name: CI / f"{name}.yml" for name in ("github_actions", "gitlab_ci", "gitee_go")}
SMALL = "configs/llama2/pretrain_llama2_7b_8p.yaml"


def rows(first: str) -> list[list[str]]:
    """Return the cells of the table whose heading begins with ``first``."""
    lines = PAGE.splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith(f"| {first} |"))
    found = []
    for line in lines[begin + 2 :]:
        if not line.startswith("|"):
            break
        found.append([cell.strip() for cell in line.strip("|").split(" | ")])
    return found


def paths(node: Any, path: str = "") -> Iterator[str]:
    """Yield the paths of all values of a tree, as ``answers[].question``; an empty list has none."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield from paths(value, f"{path}.{key}" if path else key)
    elif isinstance(node, list | tuple):
        for value in node:
            yield from paths(value, f"{path}[]")
    else:
        yield path


def documented_keys() -> list[str]:
    return [cells[0].strip("`") for cells in rows("key")]


def documented_figures(question: str) -> list[str]:
    cells = [cells[1] for cells in rows("question") if cells[0] == f"`{question}`"]
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


def undocumented(found: Any, known: list[str]) -> list[str]:
    patterns = [name.replace("[", "[[]") for name in known]
    return sorted({path for path in paths(found) if not any(fnmatchcase(path, pattern) for pattern in patterns)})


def test_the_table_of_questions_is_theirs():
    said = [
        [f"`{item.name}`", item.text, item.by, f"`mindllm {item.verb}`" if item.verb else "–", item.open or "–"]
        for item in QUESTIONS.values()
    ]
    assert rows("`--allow`") == said


@pytest.mark.parametrize("run", [SMALL, "configs/llama2/pretrain_llama2_tiny.yaml"])
def test_every_key_of_a_proof_is_documented(run):
    tree = mindllm.prove(run, quick=True, allow=[DATA]).to_dict()
    for answer in tree["answers"]:
        assert undocumented(answer.pop("figures"), documented_figures(answer["question"])) == []
        answer["figures"] = 0
    assert undocumented(tree, documented_keys()) == []


def test_every_documented_key_is_one_of_a_proof():
    tree = mindllm.prove(SMALL, quick=True).to_dict()
    tree["allowed"] = [""]
    finding = {"message": "", "advice": "", "key": "", "file": "", "line": None}
    table = {"title": "", "columns": [""], "rows": [[""]]}
    tree["answers"][0] |= {"findings": [finding], "evidence": [""], "tables": [table], "figures": 0}
    there = set(paths(tree))
    for key in documented_keys():
        assert any(fnmatchcase(path, key.replace("[", "[[]")) for path in there), key


def test_figures_of_proved_questions_are_documented():
    (answer,) = step_time.answers(mindllm.load_config(SMALL), Options(), unwatched)
    assert undocumented(answer.figures, documented_figures(STEP_TIME)) == []
    memory = stages.judged(simulate(pipeline(2, 8, 8), FormulaSimulations(), None, False), "")
    assert undocumented(memory.tree()["figures"], documented_figures(MEMORY)) == []
    times = {"compile": 1.0, "execute": 1.0, "total": 2.0}
    parity = ranks._parity(Verification("run", Outcome(cluster_run(tp=2), (), ("loss",), 2, seconds=times)))
    assert undocumented(parity.figures, documented_figures("parity")) == []
    effects = {"patterns": [{field.name: 0 for field in fields(Effect)}]}
    assert undocumented(effects, documented_figures("recomputation")) == []


def test_figures_that_are_documented_are_read_somewhere():
    """What no short proof gives here stands in the source of its check."""
    for question, module in (
        ("communication", "graphs"),
        ("data", "data"),
        ("checkpoints", "checkpoints"),
        ("start", "start"),
    ):
        text = (ROOT / "mindllm" / "prove" / "checks" / f"{module}.py").read_text(encoding="utf-8")
        names = documented_figures(question)
        assert names
        assert [name for name in names if f'"{name}"' not in text] == []


def commands() -> list[str]:
    """Return every command of the page and of the examples that proves."""
    blocks = re.findall(r"^```bash\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    texts = [*blocks, *re.findall(r"`(mindllm prove [^`]+)`", PAGE), SCRIPT.read_text(encoding="utf-8")]
    lines = [line.strip() for text in texts for line in text.splitlines()]
    return [
        line.replace('"${changed[@]}"', "runs/a.yaml runs/b.yaml")
        for line in lines
        if line.startswith("mindllm prove ")
    ]


@pytest.mark.parametrize("command", commands())
def test_every_command_is_one_of_ours(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options, keys = make_parser().parse_known_args(shlex.split(command)[2:])
    assert options.runs
    assert set(options.allow) <= set(QUESTIONS)
    assert all(re.fullmatch(r"--[\w.]+=\S+", key) for key in keys), keys


def strings(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        node = list(node.values())
    if isinstance(node, list):
        for value in node:
            yield from strings(value)
    elif isinstance(node, str):
        yield node


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_a_host_calls_the_script_and_keeps_what_it_writes(name):
    tree = yaml.safe_load(FILES[name].read_text(encoding="utf-8"))
    told = list(strings(tree))
    (call,) = [text for text in told if "prove_changed.sh" in text]
    assert shlex.split(call)[:2] == ["bash", "ci/prove_changed.sh"]
    assert len(shlex.split(call)) == 3
    options, _ = make_parser().parse_known_args(shlex.split(commands()[-1])[2:])
    kept = {Path(line).name for text in told for line in text.split()}
    assert {options.output.name, options.junit.name} <= kept
    assert (options.sarif.name in kept) is (name != "gitee_go")
    assert f"examples/ci/{name}.yml" in PAGE


def git(directory, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", *identity, *arguments], cwd=directory, check=True, capture_output=True)


@pytest.fixture
def change(tmp_path):
    """A shallow clone of a repository with three runs, and a stand-in for ``mindllm`` that notes what it is given."""
    origin = tmp_path / "origin"
    (origin / "runs" / "deep").mkdir(parents=True)
    for name in ("runs/a.yaml", "runs/gone.yaml", "runs/same.yaml", "other.yaml"):
        (origin / name).write_text("seed: 1\n")
    git(origin, "init", "-q", "-b", "main")
    git(origin, "add", ".")
    git(origin, "commit", "-qm", "runs")
    (tmp_path / "bin").mkdir()
    stand_in = tmp_path / "bin" / "mindllm"
    stand_in.write_text('#!/bin/sh\nprintf "%s\\n" "$@" > ../given\nexit 3\n')
    stand_in.chmod(0o755)
    git(tmp_path, "clone", "-q", "--depth", "1", f"file://{origin}", "work")
    work = tmp_path / "work"

    def changed(*names, removed=()):
        git(work, "checkout", "-q", "-b", "change")
        for name in names:
            (work / name).parent.mkdir(exist_ok=True)
            (work / name).write_text("seed: 2\n")
        for name in removed:
            (work / name).unlink()
        git(work, "add", "-A")
        git(work, "commit", "-qm", "change", "--allow-empty")
        (origin / "runs" / "same.yaml").write_text("seed: 3\n")  # what others have changed meanwhile
        git(origin, "commit", "-qam", "meanwhile")
        environment = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
        done = subprocess.run(
            ["bash", SCRIPT, "main"], cwd=work, env=environment, capture_output=True, text=True, check=False
        )
        given = tmp_path / "given"
        return done, given.read_text().splitlines() if given.exists() else None

    return changed


def test_the_script_proves_the_runs_that_a_change_touches(change):
    done, given = change("runs/a.yaml", "runs/deep/a new one.yaml", "other.yaml", removed=["runs/gone.yaml"])
    assert done.returncode == 3, done.stderr
    assert given[:4] == ["prove", "runs/a.yaml", "runs/deep/a new one.yaml", "--allow"]


def test_the_script_does_nothing_where_no_run_has_changed(change):
    done, given = change("other.yaml")
    assert (done.returncode, done.stdout, given) == (0, "no YAML below runs/ has changed\n", None)


def test_outcomes_are_those_of_the_page():
    said = {cells[0]: cells[1] for cells in rows("`--junit`")}
    proof: Proof = mindllm.prove(SMALL, quick=True, allow=[DATA])
    for answer in proof.answers:
        assert answer.standing.value in said[outcome(answer, proof) or "passed"]
