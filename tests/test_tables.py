"""Tables keep every figure whole at any width."""

import io
import re

import pytest

from mindllm.terminal.console import PlainConsole
from mindllm.terminal.tables import Table, figures, texts

NAMES = (
    "weights",
    "optimizer state",
    "gradients",
    "activations",
    "communication buffers",
    "used peak",
    "with fragments",
)
ROWS = [(str(row), *(str(row * 100_000 + 12_345 + place) for place in range(len(NAMES)))) for row in range(3)]


def lines(table, width):
    file = io.StringIO()
    PlainConsole(file=file, width=width).print(table)
    return file.getvalue().splitlines()


def wide_table(text="extrapolated: 6 smaller runs"):
    return Table("memory, MB", [*figures("stage", *NAMES), *texts("how")], [(*row, text) for row in ROWS])


@pytest.mark.parametrize("width", [40, 80, 120, 150])
def test_no_figure_and_no_heading_is_cut_at(width):
    found = lines(wide_table(), width)
    assert max(map(len, found)) <= width
    figures_shown = re.findall(r"\d+", "\n".join(found).replace("6 smaller", ""))
    assert {figure for row in ROWS for figure in row} <= set(figures_shown)
    words = set("\n".join(found).split())
    assert {word for name in NAMES for word in name.split()} <= words
    assert "…" not in "\n".join(found)


def test_what_does_not_fit_is_stacked_below_with_its_row():
    found = lines(wide_table(), 60)
    heads = [line for line in found if line.startswith("stage")]
    assert len(heads) > 1
    assert all(any(line.lstrip().startswith(f"{row[0]} ") for line in found) for row in ROWS)


def test_a_wide_terminal_gets_one_line_a_row():
    assert len(lines(wide_table(), 250)) == 1 + 1 + len(ROWS)


def test_texts_are_folded_before_anything_is_stacked():
    table = Table("", [*figures("stage"), *texts("why")], [("0", "because " * 20)])
    found = lines(table, 50)
    assert max(map(len, found)) <= 50
    assert sum(line.count("because") for line in found) == 20
    assert sum(line.startswith("stage") for line in found) == 1


def test_without_a_terminal_nothing_is_folded(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert len(lines(wide_table("long " * 100), None)) == 1 + 1 + len(ROWS)


def test_wide_characters_stand_in_line():
    found = lines(Table("", [*texts("name"), *figures("x")], [("模型", "1"), ("ab", "2"), ("", "3")]), 80)
    assert found == ["name  x", "模型  1", "ab    2", "      3"]


def test_a_row_has_a_cell_for_every_column():
    with pytest.raises(ValueError, match="1 cells for 2 columns"):
        Table("", texts("a", "b"), [("x",)])
