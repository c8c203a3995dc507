"""The command that prints every published step beside its prediction."""

import csv
from pathlib import Path

import pytest

from mindllm.errors import UserError
from toolkit.benchmark.ground_truth import Compared, compared, main, tables

DATA = Path(__file__).parents[1] / "ground_truth"
TABLES = ("throughput", "llama2_13b_tuning", "korthikanti_step_time", "vtrain_multi_node_a100", "zero_bubble")


def test_groups_have_the_mean_the_median_and_the_sign_of_their_errors():
    rows = [
        Compared("a", "1", 1.0, 1.1),
        Compared("b", "2", 2.0, 1.0),
        Compared("a", "3", 1.0, 0.7),
        Compared("a", "4", 1.0, 1.2),
    ]
    (_, _, lines), (_, _, groups) = tables(rows)
    assert lines[1] == ("b", "2", "2", "1", "-50.0%")
    assert groups == [("a", "3", "20.0%", "20.0%", "30.0%", "+0.0%"), ("b", "1", "50.0%", "50.0%", "50.0%", "-50.0%")]


def test_every_table_is_a_group_of_its_own(tmp_path):
    """One row of each; a Korthikanti row is two steps, one of Qi et al. two schedules."""
    for name in TABLES:
        lines = (DATA / f"{name}.csv").read_text(encoding="utf-8").splitlines()
        (tmp_path / f"{name}.csv").write_text("\n".join(lines[:2]), encoding="utf-8")
    found = compared(tmp_path)
    assert [row.group for row in found] == [
        "MindFormers, experts", "ladder", "Korthikanti", "Korthikanti", "vTrain", *["zero bubble"] * 2,
    ]  # fmt: skip
    with open(DATA / "vtrain_multi_node_a100.csv", encoding="utf-8") as file:
        first = next(csv.DictReader(file))
    assert found[4].published == float(first["iteration time (ms)"]) / 1e3
    assert all(abs(row.error) < 0.3 for row in found)


def test_a_table_that_is_missing_is_an_error(tmp_path):
    with pytest.raises(UserError, match=r"throughput\.csv"):
        compared(tmp_path)
    with pytest.raises(UserError, match="is not a directory"):
        main(["--data", str(tmp_path / "none")])
