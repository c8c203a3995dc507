"""The command line of the cluster check: the answer, its exit codes, its JSON, and what it refuses."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from planted import plant
from small_cluster import cluster_run

from mindllm.cli import check as command
from mindllm.compiled.conformance import Finding
from mindllm.compiled.execute.cluster import ClusterStep
from mindllm.compiled.rank.compile_ranks import compile_ranks
from mindllm.config import load_config, render_config
from mindllm.errors import RunFailed, UserError
from mindllm.reduced_runs.model import reduce_model
from mindllm.train.compile_cache import step_key
from mindllm.train.engine import StepResult
from mindllm.verify import check as subject
from mindllm.verify.compare import TOLERANCES, Comparison, TensorError
from mindllm.verify.report import write_table
from mindllm.verify.verification import configurations

ROOT = Path(__file__).resolve().parents[2]


def write(path: Path, **run) -> Path:
    path.write_text(render_config(cluster_run(**run)), encoding="utf-8")
    return path


def start(*arguments: object) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "mindllm.main", "check", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(words, capture_output=True, text=True, env=environment, timeout=500, check=False)


def test_a_good_configuration_from_the_command_line(tmp_path, graph_cache):
    """fp16 as the YAML says, grouped queries, two ranks; what it printed is read as a program would."""
    path = write(tmp_path / "run.yaml", tp=2)
    table = tmp_path / "proven.md"
    done = start("--config", path, "--real_dtype", "--json", "--cache", graph_cache, "--table", table)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["ok"] is True
    assert found["ranks"] == 2
    assert found["dtype"] == "float16"
    assert len(found["losses"]) == len(found["single_device_losses"]) == 2
    assert found["losses"] == pytest.approx(found["single_device_losses"], rel=5e-4)
    assert 0 < found["max_parameter_error"] < 5e-3
    assert found["overflow_skipped"] is True
    assert "| 2 | tp2 | yes |" in table.read_text()
    assert found["obeys"] is True
    assert {"recomputation", "shardings", "parts of a batch"} <= {finding["what"] for finding in found["asked_for"]}


def test_a_vocabulary_that_does_not_divide_is_refused_before_anything_is_compiled(tmp_path):
    path = write(tmp_path / "run.yaml", tp=2)
    done = start("--config", path, "--model.model_config.vocab_size=129")
    assert done.returncode == 2
    assert "vocab_size: is not divisible by parallel_config.model_parallel 2 (value 129)" in " ".join(
        done.stderr.split()
    )
    assert "Traceback" not in done.stderr


def test_one_device_and_no_steps_are_refused(tmp_path):
    path = write(tmp_path / "run.yaml", use_parallel=False)
    with pytest.raises(UserError, match="describes one device; there is nothing to compare it with"):
        command.main(["--config", str(path)])
    with pytest.raises(UserError, match="--steps must be at least 1"):
        command.main(["--config", str(path), "--steps", "0"])


def test_a_difference_ends_with_3(tmp_path, monkeypatch, capsys):
    config = cluster_run(tp=2)
    seconds = {"compile": 1.0, "execute": 1.0, "total": 2.0}
    good = subject.Outcome(config, (), (), 2, seconds=seconds)
    bad = replace(
        good, problems=("step 1: loss: 4.6 on a single device, 5.1 on the cluster",), first_difference="MatMul"
    )
    path = str(write(tmp_path / "run.yaml", tp=2))
    otherwise = (Finding("parts of a batch", "4", "2", ("rank 0: layer 0 runs 2 times in a step, not 4",)),)
    disobeyed = replace(good, asked_for=otherwise)
    for outcome, code in ((good, 0), (bad, 3), (disobeyed, 3)):
        monkeypatch.setattr(subject, "check", lambda *_, outcome=outcome: outcome)
        assert command.main(["--config", path, "--no_cache"]) == code
    printed = capsys.readouterr().out
    assert "step 1: loss: 4.6 on a single device, 5.1 on the cluster" in printed
    assert "first difference: MatMul" in printed
    assert "parts of a batch: rank 0: layer 0 runs 2 times in a step, not 4" in printed
    assert "the graphs do not match the YAML" in printed


def adds_heads(node):
    return node.op == "AllReduce" and not node.backward and "0-DecoderLayer/attention-Attention/wo-Linear" in node.scope


def renamed(name):
    def change(primitive):
        primitive.op_type = name

    return change


def of_largest(primitive):
    next(attribute for attribute in primitive.attribute if attribute.name == "op").s = b"max"


@pytest.fixture
def planted(tmp_path, graph_cache):
    """The command in fp16 on two tensor-parallel ranks, with a mistake in the graphs of all or of one; its exit code."""
    path = write(tmp_path / "run.yaml", tp=2)
    options = ["--config", str(path), "--real_dtype", "--json"]
    small = reduce_model(load_config(path), real_dtype=True)
    compile_ranks(small, graph_cache)

    def run(change, ranks=(0, 1), where=adds_heads):
        cache = tmp_path / "cache"
        shutil.copytree(graph_cache, cache)
        for rank in ranks:
            plant(cache / f"ranks-{step_key(small)}" / f"rank_{rank}.graph", where, change)
        return command.main([*options, "--cache", str(cache)])

    return run


def test_a_mistake_is_found_from_the_command_line(planted, capsys):
    """The largest part of a sum in place of the sum: operator, rank, scope, strategy and line."""
    assert planted(of_largest) == 3
    first, *lines = json.loads(capsys.readouterr().out)["first_difference"].splitlines()
    assert first.startswith("AllReduce on rank 0 at Default/")
    assert first.endswith("layers-CellList/0-DecoderLayer/attention-Attention/wo-Linear/AllReduce-op0")
    assert "its operand is from MatMul at " in lines[1]
    assert lines[2] == "  strategy ((1, 2), (1, 2))"
    assert "linear.py:" in lines[3]


def test_ranks_that_do_not_meet_are_named_from_the_command_line(planted, capsys):
    assert planted(renamed("Broadcast"), ranks=[1]) == 3
    head, *lines = json.loads(capsys.readouterr().out)["problems"][0].splitlines()
    assert head == "no rank can go on:"
    assert [" ".join(line.split()[:8]) for line in lines] == [
        "rank 0 waits in AllReduce over ranks 0,",
        "rank 1 waits in Broadcast over ranks 0,",
    ]


def recomputed(primitive):
    mark = primitive.attribute.add()
    mark.name, mark.type, mark.i = "recompute", mark.BOOL, 1


def test_a_yaml_that_is_not_obeyed_is_told_from_the_command_line(planted, capsys):
    """An operator is marked for recomputation on one rank: everything computed is right, the verdict is not."""
    assert planted(recomputed, [1], lambda node: node.op == "SiLU" and "/0-DecoderLayer/" in node.scope) == 3
    found = json.loads(capsys.readouterr().out)
    assert found["problems"] == []
    assert found["obeys"] is False
    wrong = [finding for finding in found["asked_for"] if not finding["holds"]]
    text = "rank 1: layer 0 recomputes feed_forward.w1.activation.silu, which nobody asked for"
    assert wrong == [
        {
            "what": "recomputation",
            "asked": "nothing",
            "found": "operators of layers 0",
            "problems": [text],
            "holds": False,
        }
    ]


@pytest.mark.slow
def test_an_exchange_that_is_unknown_is_named_from_the_command_line(planted):
    with pytest.raises(RunFailed, match=r"rank 0: AlltoAllVC over ranks 0, 1 at Default/.* cannot be carried out here"):
        planted(renamed("AlltoAllVC"))


def test_a_directory_stands_for_its_runs_on_several_devices(tmp_path):
    (tmp_path / "base").mkdir()
    (tmp_path / "none").mkdir()
    (tmp_path / "base" / "part.yaml").write_text("seed: 1\n")
    write(tmp_path / "four.yaml", dp=4)
    write(tmp_path / "one.yaml", use_parallel=False)
    write(tmp_path / "two.yaml", tp=2)
    found = configurations([tmp_path], [])
    assert [Path(name).name for name, _ in found] == ["two.yaml", "four.yaml"]
    with pytest.raises(UserError, match="contains no YAML of a run on several devices"):
        configurations([tmp_path / "none"], [])


def test_of_several_runs_one_that_fails_does_not_stop_the_others(tmp_path, monkeypatch, capsys):
    good, bad = write(tmp_path / "good.yaml", tp=2), write(tmp_path / "bad.yaml", dp=2)

    def answer(config, *_):
        if config.parallel_config.data_parallel == 2:
            raise UserError("it does not compile")
        return subject.Outcome(config, (), (), 2, seconds={"compile": 1.0, "execute": 1.0, "total": 2.0})

    monkeypatch.setattr(subject, "check", answer)
    table = tmp_path / "table.md"
    assert command.main(["--config", str(bad), str(good), "--table", str(table), "--no_cache"]) == 3
    assert "cannot be checked: it does not compile" in table.read_text()
    assert "it does not compile" in capsys.readouterr().out
    with pytest.raises(UserError, match="it does not compile"):
        command.main(["--config", str(bad), "--no_cache"])


def refuse_constant(name):
    raise AssertionError(f"{name} is no JSON")


def test_a_loss_that_is_no_number_is_answered_in_strict_json(tmp_path, monkeypatch, capsys):
    def answer(config, *_):
        single = StepResult(math.nan, math.inf, overflow=False, tokens=8)
        step = ClusterStep(math.nan, (math.nan,) * 2, (math.inf,) * 2, (False,) * 2, (8,) * 2)
        error = TensorError("weight", 0, math.nan, math.nan)
        step_of_both = Comparison(single, step, (error,), TOLERANCES["float32"])
        return subject.Outcome(config, (step_of_both,), tuple(step_of_both.problems()), 2)

    monkeypatch.setattr(subject, "check", answer)
    assert command.main(["--config", str(write(tmp_path / "run.yaml", tp=2)), "--no_cache", "--json"]) == 3
    found = json.loads(capsys.readouterr().out, parse_constant=refuse_constant)
    assert (found["losses"], found["global_norms"], found["max_parameter_error"]) == (["NaN"], ["Infinity"], "NaN")


def test_a_table_keeps_the_rows_of_other_runs(tmp_path):
    seconds = {"compile": 1.0, "execute": 1.0, "total": 2.0}
    first, second = (subject.Outcome(cluster_run(tp=ranks), (), (), ranks, seconds=seconds) for ranks in (1, 2))
    table = tmp_path / "table.md"
    notes = table.with_name("notes.md")
    notes.write_text("# Notes\n")
    with pytest.raises(UserError, match=r"notes\.md: not a table of mindllm check"):
        write_table([("a.yaml", first)], notes)
    assert notes.read_text() == "# Notes\n"
    write_table([("a.yaml", first), ("b.yaml", first)], table)
    before = table.read_text().splitlines()
    write_table([("a.yaml", second), ("c.yaml", first)], table)
    after = table.read_text().splitlines()
    assert after[:2] == before[:2]
    assert after[3] == before[3]
    assert "| `a.yaml` | 2 | tp2 |" in after[2]
    assert [line.split("`")[1] for line in after[2:]] == ["a.yaml", "b.yaml", "c.yaml"]


def test_a_broken_file_of_a_directory_is_told_and_the_others_are_checked(tmp_path, monkeypatch, capsys):
    write(tmp_path / "good.yaml", tp=2)
    (tmp_path / "broken.yaml").write_text("model: [\n")

    def answer(config, *_):
        return subject.Outcome(config, (), (), 2, seconds={"compile": 1.0, "execute": 1.0, "total": 2.0})

    monkeypatch.setattr(subject, "check", answer)
    assert command.main(["--config", str(tmp_path), "--no_cache", "--json"]) == 2
    printed = capsys.readouterr()
    good, broken = json.loads(printed.out)
    assert (good["ok"], broken["ok"]) == (True, False)
    assert good["schema"] == broken["schema"]
    assert "broken.yaml" in broken["config"]
    assert "not valid YAML" in printed.err
