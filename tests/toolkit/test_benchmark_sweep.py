"""Sweeps: their points, processes that are watched, results that are kept, and tables with merged cells."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from mindllm.errors import CheckFailed, RunFailed, UserError
from toolkit.benchmark.sweep import run as sweep_run
from toolkit.benchmark.sweep.__main__ import main
from toolkit.benchmark.sweep.figures import of_dry_run, of_run, of_steps, percentile
from toolkit.benchmark.sweep.picture import draw, series
from toolkit.benchmark.sweep.plan import SWEEPS, points, read_sweep
from toolkit.benchmark.sweep.process import watched
from toolkit.benchmark.sweep.run import RESULTS, read_results, run_sweep
from toolkit.benchmark.sweep.tables import html, markdown, spans

BASE = """
lr_schedule: {type: ConstantWarmUpLR, learning_rate: 1e-2}
train_dataset: {data_loader: {config: {data_path: unused}}}
runner_config: {batch_size: 2, train_steps: 6}
context: {enable_graph_kernel: false}
model:
  model_config: {vocab_size: 97, hidden_size: 16, num_layers: 1, num_heads: 4, intermediate_size: 24, seq_length: 8}
"""
LENGTH, RANK = "model.model_config.seq_length", "model.model_config.pet_config.lora_rank"


@pytest.fixture
def sweep_of(tmp_path):
    """A sweep over the small run with these keys, read from a file."""

    def make(**keys):
        (tmp_path / "base.yaml").write_text(BASE)
        tree = {"title": "Small", "base": "base.yaml", "mode": "measure", "axes": {LENGTH: [8, 16]}, **keys}
        path = tmp_path / "sweep.yaml"
        path.write_text(yaml.safe_dump(tree, sort_keys=False))
        return read_sweep(path)

    return make


def test_axes_are_combined_and_variants_may_change_several_keys(sweep_of):
    variants = {"LoRA": {RANK: 4}, "full": {}}
    found = list(points(*sweep_of(axes={"tuner": variants, LENGTH: [8, 16]}, fixed={"seed": 3})))
    assert [dict(point.labels) for point in found] == [
        {"tuner": tuner, LENGTH: length} for tuner in ("LoRA", "full") for length in ("8", "16")
    ]
    ranks = [point.config.model.config.pet_config for point in found]
    assert [pet and pet.lora_rank for pet in ranks] == [4, 4, None, None]
    assert {point.config.seed for point in found} == {3}
    assert len({point.key for point in found}) == 4
    assert found[0].describe() == "tuner LoRA, seq_length 8"


def test_a_point_is_known_by_what_it_computes_and_not_by_its_labels(sweep_of):
    first = next(points(*sweep_of(axes={"a": {"x": {LENGTH: 8}}})))
    second = next(points(*sweep_of(axes={"b": {"y": {LENGTH: 8}}})))
    longer = next(points(*sweep_of(axes={"b": {"y": {LENGTH: 8}}}, steps=20)))
    assert first.key == second.key != longer.key


def test_a_point_that_is_no_run_says_why(sweep_of):
    found = list(points(*sweep_of(axes={RANK: [4, 1000]})))
    assert found[0].config is not None
    assert found[1].config is None
    assert "lora_rank" in found[1].refused


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"axes": {}}, "sweep.yaml: axes: needs at least one axis"),
        ({"axes": {LENGTH: []}}, f"axis {LENGTH} has no value"),
        ({"mode": "guess"}, "sweep.yaml: mode: must be"),
        ({"step": 3}, "sweep.yaml: step: unknown key"),
    ],
)
def test_sweeps_that_are_none(sweep_of, keys, words):
    with pytest.raises(UserError) as refused:
        sweep_of(**keys)
    assert words in str(refused.value)


def test_a_base_that_is_not_there(sweep_of):
    with pytest.raises(UserError, match=r"sweep.yaml: base: no such file \(value nowhere.yaml\)"):
        list(points(*sweep_of(base="nowhere.yaml")))


@pytest.mark.parametrize("path", sorted(SWEEPS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_point_of_the_shipped_sweeps_is_a_run(path):
    sweep, source = read_sweep(Path(path.stem))
    synthetic = {"train_dataset.data_loader.config.data_path": "x"} if sweep.synthetic else None
    assert [point.refused for point in points(sweep, source, synthetic) if point.refused] == []


def python(program):
    return [sys.executable, "-c", program]


def test_a_process_beyond_its_memory_or_its_time_is_ended(tmp_path):
    large = watched(
        python("x = bytearray(b'1') * (300 << 20); input()\nimport time; time.sleep(60)"), tmp_path, None, 60
    )
    assert large.code != 0  # it has no input
    assert not large.out_of_memory
    hungry = "import time\nx = bytearray(b'1') * (300 << 20)\ntime.sleep(60)"
    ended = watched(python(hungry), tmp_path, 200 << 20, 60)
    assert (ended.over, ended.out_of_memory) == ("memory", True)
    assert ended.peak_bytes > 200 << 20
    late = watched(python("import time; time.sleep(60)"), tmp_path, None, 0.5)
    assert (late.over, late.out_of_memory) == ("time", False)
    said = watched(python("raise MemoryError"), tmp_path, None, 60)
    assert said.out_of_memory


RUNS = """
import json, pathlib, sys, yaml
run = yaml.safe_load(open(sys.argv[-1]))
length = run["model"]["model_config"]["seq_length"]
if length == 16:
    sys.exit("error: Allocate memory failed")
directory = pathlib.Path(run["output_dir"])
directory.mkdir()
with open(directory / "metrics.jsonl", "w") as file:
    for step in range(1, 7):
        seconds = 5.0 if step == 1 else 0.5
        print(json.dumps({"step": step, "step_time_s": seconds, "tokens_per_s": 16 / seconds, "loss": 3.0 - step}), file=file)
with open("calls", "a") as file:
    print(length, file=file)
"""


def test_every_point_is_a_line_out_of_memory_is_one_too_and_none_is_repeated(sweep_of, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep_run, "TRAIN", python(RUNS))
    sweep, source = sweep_of(axes={LENGTH: [8, 16, 32], RANK: [4, 1000]})
    found = list(points(sweep, source))
    told = []
    results = run_sweep(sweep, found[:2], tmp_path / "out", told.append)
    (tmp_path / "out" / RESULTS).open("a").write('{"torn')
    results = run_sweep(sweep, found, tmp_path / "out", told.append)
    assert [result["status"] for result in results] == ["ok", "refused", "out of memory", "refused", "ok", "refused"]
    assert results[0]["figures"]["tokens_per_s"] == pytest.approx(32)
    assert results[0]["figures"]["compile_s"] == pytest.approx(4.5)
    assert results[0]["figures"]["trained_parameters"] < results[0]["figures"]["parameters"]
    assert results[2]["why"] == "Allocate memory failed"
    assert Path("calls").read_text().split() == ["8", "32"]
    begun = [line for line in told if line[0].isdigit()]
    assert len(begun) == 2 + 5  # what was refused is looked at again
    assert told[1].startswith("  ok after ")
    assert told[3].startswith("  refused after 0 s: ")
    assert yaml.safe_load(Path(results[0]["config"]).read_text())["runner_config"]["train_steps"] == sweep.steps
    lines = [json.loads(line) for line in (tmp_path / "out" / RESULTS).read_text().splitlines()]
    assert {line["key"] for line in lines} == {point.key for point in found} == set(read_results(tmp_path / "out"))
    run_sweep(sweep, found, tmp_path / "out", told.append, again=("out of memory",))
    assert len([line for line in told if line[0].isdigit()]) == 7 + 1 + 3


def test_the_command_writes_tables_and_ends_with_what_failed(sweep_of, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep_run, "TRAIN", python(RUNS))
    sweep_of(axes={LENGTH: [8, 16]})
    assert main(["--config", "sweep.yaml", "--output", "out", "--markdown", "page.md"]) == 0
    assert (
        "python -m toolkit.benchmark.sweep --config sweep.yaml --output out --markdown page.md"
        in Path("page.md").read_text()
    )
    assert "| 16 | out of memory |" in Path("page.md").read_text()
    printed = capsys.readouterr().out
    assert "out of memory: Allocate memory failed" in printed
    assert (tmp_path / "out" / "sweep" / "table.png").stat().st_size > 1000
    assert "| 16 | out of memory |" in (tmp_path / "out" / "sweep" / "table.md").read_text()
    assert main(["--config", "sweep.yaml", "--list"]) == 0
    monkeypatch.setattr(sweep_run, "TRAIN", python("raise SystemExit(1)"))
    sweep_of(axes={LENGTH: [24]})
    with pytest.raises(CheckFailed, match="1 of 1 points failed"):
        main(["--config", "sweep.yaml", "--output", "out"])
    refuses = "import sys; print('error: no such checkpoint', file=sys.stderr); sys.exit(2)"
    monkeypatch.setattr(sweep_run, "TRAIN", python(refuses))
    sweep_of(axes={LENGTH: [40, 48]})
    with pytest.raises(CheckFailed, match="no point of 2 has figures; refused: no such checkpoint"):
        main(["--config", "sweep.yaml", "--output", "out"])


def result(status, tokens, **labels):
    figures = {"tokens_per_s": tokens, "trained_parameters": 17891328} if tokens else {}
    return {"labels": labels, "status": status, "why": "" if status == "ok" else "too large", "figures": figures}


ROWS = [
    result("ok", 1234.5, model="a", length="1"),
    result("ok", 1000.0, model="a", length="2"),
    result("out of memory", None, model="b", length="2"),
]
AXES, COLUMNS = ("model", "length"), ("tokens_per_s", "trained_parameters")


def test_a_sweep_that_is_killed_leaves_no_process_behind(tmp_path):
    program = f"""
import sys
from pathlib import Path
from toolkit.benchmark.sweep.process import watched
sleeps = "import os, time; open('pid', 'w').write(str(os.getpid())); time.sleep(60)"
watched([sys.executable, "-c", sleeps], Path({str(tmp_path)!r}), None, 60)
"""
    sweep = subprocess.Popen(python(program), cwd=tmp_path)
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        time.sleep(0.05)
    point = Path("/proc") / (tmp_path / "pid").read_text()
    sweep.kill()
    sweep.wait()
    deadline = time.monotonic() + 30
    while point.exists() and "State:\tZ" not in (point / "status").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_memory_of_steps_is_what_was_taken_once_the_first_one_was_over(tmp_path):
    program = """
import time
large = bytearray(b"1") * (200 << 20)
time.sleep(1)
del large
open("metrics", "w").close()
time.sleep(1)
open("metrics", "w").write("step")
time.sleep(1.5)
"""
    metrics = tmp_path / "metrics"
    moved = f"import os; os.chdir({str(tmp_path)!r})\n{program}"
    ended = watched(python(moved), tmp_path, None, 60, begun=metrics)
    assert 0 < ended.later_bytes < 150 << 20 < ended.peak_bytes


def test_cells_are_merged_only_below_merged_ones():
    assert spans([row["labels"] for row in ROWS], AXES) == [[2, 1], [0, 1], [1, 1]]


def test_tables_of_two_kinds():
    assert markdown("T", AXES, COLUMNS, ROWS).splitlines()[2:] == [
        "| model | length | tokens per s | trained parameters |",
        "| --- | --- | --- | --- |",
        "| a | 1 | 1,234 | 17.8913 M |",
        "|  | 2 | 1,000 | 17.8913 M |",
        "| b | 2 | out of memory |  |",
        "",
        "- out of memory: too large",
    ]
    page = html("T", AXES, COLUMNS, ROWS)
    assert '<td class="axis" rowspan="2">a</td>' in page
    assert page.count("<tr") == 4


def test_a_picture_has_bars_for_what_was_found_and_none_where_nothing_was():
    assert series(AXES, ROWS)[0] == ["1", "2"]
    assert list(series(AXES, ROWS)[1]) == ["a", "b"]
    assert draw("T", AXES, COLUMNS, ROWS).startswith(b"\x89PNG")
    assert draw("T", AXES, COLUMNS, ROWS[2:]) == b""


def test_figures_of_steps_leave_out_the_warm_up():
    records = [
        {"step": n, "step_time_s": s, "tokens_per_s": 100 / s, "loss": 1.0} for n, s in enumerate((9, 1, 2, 3, 10), 1)
    ]
    figures = of_steps(records, 2)
    assert (figures["step_p50_s"], figures["step_p95_s"], figures["steps_counted"]) == (3, 10, 3)
    assert figures["compile_s"] == 6
    assert percentile(range(1, 101), 95) == 95
    with pytest.raises(RunFailed, match="all of them warm-up"):
        of_steps(records, 5)


def test_a_tuned_run_has_losses_and_scores(tmp_path):
    line = {"step_time_s": 1.0, "tokens_per_s": 8.0}
    steps = [
        {"step": n, "loss": float(n), **line, **({"scores": {"arc": 0.25}} if n == 20 else {})} for n in range(1, 21)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    (tmp_path / "evaluation.jsonl").write_text('{"step": 10, "loss": 2.5}\n{"step": 20, "loss": 1.5}\n')
    figures = of_run(tmp_path, 3, tunes=True)
    assert (figures["train_loss"], figures["held_out_loss"], figures["arc"]) == (19.5, 1.5, 0.25)


def test_the_fullest_stage_is_that_of_the_table():
    stage = {"weights_mb": 1, "optimizer_mb": 2, "gradients_mb": 3, "activations_mb": 4, "used_peak_mb": 5}
    printed = "lines\n" + json.dumps({"stages": [{**stage, "actual_peak_mb": 7}, {**stage, "actual_peak_mb": 9}]})
    assert of_dry_run(printed)["peak_memory_mb"] == 9
    with pytest.raises(RunFailed, match="no figures"):
        of_dry_run("nothing")


@pytest.mark.slow
def test_a_sweep_measures_runs(sweep_of, tmp_path, capsys):
    sweep_of(synthetic=True, steps=5, warmup=2, axes={"tuner": {"LoRA": {RANK: 4}, "full": {}}})
    assert main(["--config", str(tmp_path / "sweep.yaml"), "--output", str(tmp_path / "out")]) == 0
    results = read_results(tmp_path / "out" / "sweep").values()
    assert [entry["status"] for entry in results] == ["ok", "ok"]
    for entry in results:
        assert entry["figures"]["peak_memory_mb"] > 100
        assert entry["figures"]["tokens_per_s"] > 0
        assert entry["figures"]["compile_s"] > 0
    assert "LoRA" in capsys.readouterr().out
