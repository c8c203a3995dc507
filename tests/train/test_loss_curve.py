"""The loss-curve tool draws what the metrics say, and says so when there is nothing to draw."""

import json
import math

import pytest
from matplotlib.figure import Figure
from PIL import Image

from mindllm.cli.loss_curve import main
from mindllm.errors import UserError
from mindllm.train.curves import draw_scores, expert_shares, read_run
from mindllm.train.metrics_file import MetricsFile


def write_run(directory, losses, **columns):
    directory.mkdir()
    lines = [json.dumps({"step": step, "loss": loss, **columns}) for step, loss in enumerate(losses, start=1)]
    (directory / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))
    return directory


def test_a_picture_of_two_runs(tmp_path):
    runs = [write_run(tmp_path / name, [4.0, 3.5, 3.0]) for name in ("a", "b")]
    (runs[0] / "evaluation.jsonl").write_text(json.dumps({"step": 3, "loss": 3.2, "unigram_loss": 5.0}) + "\n")
    assert main([*map(str, runs), "--output", str(tmp_path / "curve.png")]) == 0
    with Image.open(tmp_path / "curve.png") as picture:
        assert picture.format == "PNG"
        assert len(picture.convert("RGB").getcolors(maxcolors=1 << 20)) > 10


def test_scores_on_tasks_have_an_axis_that_holds_them(tmp_path):
    directory = write_run(tmp_path / "run", [4.0, 3.0, 2.0])
    scored = {"step": 4, "loss": 1.0, "scores": {"arc/acc": 0.25, "wikitext/word_perplexity": 80.0}}
    with (directory / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(scored) + "\n")
    axes = Figure().subplots()
    draw_scores(axes, [read_run(directory)])
    (right,) = (other for other in axes.figure.axes if other is not axes)
    assert [list(line.get_ydata()) for line in right.lines] == [[0.25], [80.0]]
    low, high = right.get_ylim()
    assert low == 0
    assert high > 80
    assert [line.get_label() for line in axes.lines] == ["run: arc/acc", "run: wikitext/word_perplexity"]


def test_a_picture_of_the_tokens_of_experts(tmp_path):
    experts = [{"layer": layer, "tokens": [30, 10, 0, 40], "dropped": 8} for layer in (1, 3)]
    directory = write_run(tmp_path / "run", [4.0, 3.5], experts=experts)
    assert expert_shares(read_run(directory))[3] == [(step, [1.5, 0.5, 0.0, 2.0], 0.1) for step in (1, 2)]
    assert main([str(directory), "--experts", "--output", str(tmp_path / "experts.png")]) == 0
    with Image.open(tmp_path / "experts.png") as picture:
        assert len(picture.convert("RGB").getcolors(maxcolors=1 << 20)) > 10


def test_a_picture_of_experts_needs_one_run_that_has_some(tmp_path, capsys):
    runs = [str(write_run(tmp_path / name, [4.0])) for name in ("a", "b")]
    with pytest.raises(UserError, match="a: metrics without experts"):
        main([runs[0], "--experts", "--output", str(tmp_path / "experts.png")])
    with pytest.raises(SystemExit) as stopped:
        main([*runs, "--experts"])
    assert stopped.value.code == 2
    assert "--experts takes one run (2 given)" in capsys.readouterr().err


def test_steps_without_a_finite_loss_are_left_out(tmp_path):
    run = read_run(write_run(tmp_path / "run", [4.0, None, 3.0]))
    assert [record["step"] for record in run.steps] == [1, 3]


@pytest.mark.parametrize("losses", [None, []])
def test_nothing_to_draw_is_said(tmp_path, losses):
    directory = tmp_path / "run"
    if losses is not None:
        write_run(directory, losses)
    with pytest.raises(UserError, match=r"metrics\.jsonl"):
        read_run(directory)


def test_losses_that_are_not_finite_leave_gaps_and_are_not_called_unfinished(tmp_path):
    losses = [2.0, math.nan, 1.0, math.inf]
    (tmp_path / "some").mkdir()
    with MetricsFile(tmp_path / "some" / "metrics.jsonl") as metrics:
        for step, loss in enumerate(losses, 1):
            metrics.append({"step": step, "loss": loss})
    assert [record["step"] for record in read_run(tmp_path / "some").steps] == [1, 3]
    assert main([str(tmp_path / "some"), "--output", str(tmp_path / "curve.png")]) == 0
    with pytest.raises(UserError, match="no step has a finite loss"):
        main([str(write_run(tmp_path / "none", [None, None])), "--output", str(tmp_path / "none.png")])
