"""Sweeps whose points differ in the seed alone: one row for all of them, with how far they lie apart."""

from __future__ import annotations

import statistics

import pytest
import yaml

from mindllm.errors import UserError
from toolkit.benchmark.sweep.means import mean_rows
from toolkit.benchmark.sweep.picture import draw
from toolkit.benchmark.sweep.plan import read_sweep
from toolkit.benchmark.sweep.tables import html, markdown

COLUMNS = ("held_out_loss", "peak_memory_mb", "trained_parameters")


def point(tuner, seed, loss, status="ok"):
    figures = {"held_out_loss": loss, "peak_memory_mb": 900, "trained_parameters": 4_999_424}
    why = "" if status == "ok" else "too large"
    labels = {"tuner": tuner, "seed": str(seed)}
    return {"labels": labels, "status": status, "why": why, "figures": figures if status == "ok" else {}}


POINTS = [point("full", 0, 2.0), point("full", 1, 3.0), point("full", 2, 4.0), point("LoRA", 0, 1.5)]


def test_points_of_one_row_have_their_mean_and_its_deviation():
    full, lora = mean_rows("seed", POINTS)
    assert full["labels"] == {"tuner": "full"}
    assert full["figures"]["held_out_loss"] == 3.0
    assert full["deviations"] == {"held_out_loss": statistics.stdev((2.0, 3.0, 4.0))}
    assert (lora["labels"], lora["deviations"]) == ({"tuner": "LoRA"}, {})
    assert markdown("T", ["tuner"], COLUMNS, [full, lora]).splitlines()[2:] == [
        "| tuner | held out loss | peak memory, GB | trained parameters |",
        "| --- | --- | --- | --- |",
        "| full | 3.0000 ± 1.0000 | 0.879 | 4.9994 M |",
        "| LoRA | 1.5000 | 0.879 | 4.9994 M |",
    ]
    assert "<td>3.0000 ± 1.0000</td>" in html("T", ["tuner"], COLUMNS, [full, lora])
    assert draw("T", ["tuner"], COLUMNS, [full, lora]).startswith(b"\x89PNG")


def test_a_row_says_which_of_its_points_did_not_come_to_an_end():
    some, none = mean_rows("seed", [*POINTS[:2], point("full", 2, None, "failed"), point("LoRA", 0, None, "failed")])
    assert (some["status"], some["figures"]["held_out_loss"]) == ("failed (1 of 3)", 2.5)
    assert (none["status"], none["why"], none["figures"]) == ("failed", "too large", {})
    assert "| full | failed (1 of 3) (2.5000 ± 0.7071) |" in markdown("T", ["tuner"], COLUMNS, [some, none])


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"mean_over": "seeds"}, "mean_over names no axis (value seeds); axes: tuner, seed"),
        ({"mean_over": "seed", "axes": {"seed": [0, 1]}}, "mean_over needs an axis beside seed"),
    ],
)
def test_a_mean_is_over_an_axis_of_several(tmp_path, keys, words):
    tree = {"title": "T", "base": "b.yaml", "mode": "tune", "axes": {"tuner": {"full": {}}, "seed": [0, 1]}, **keys}
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
    with pytest.raises(UserError) as refused:
        read_sweep(tmp_path / "sweep.yaml")
    assert words in str(refused.value)
