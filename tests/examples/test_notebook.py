"""examples/prove_a_run.ipynb: its cells run in order, and what each ends with can be shown."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "prove_a_run.ipynb"
COMPILES = "## What fills the memory?"  # from this cell on MindSpore compiles


def read():
    return json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]


def value_of(source, names):
    """Run a cell and return the value of its last line, as a notebook shows it; None where it is no expression."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, str(NOTEBOOK), "exec"), names)
    return eval(compile(ast.Expression(last.value), str(NOTEBOOK), "eval"), names) if last else None


def run(cells):
    """Run the cells of code in order; return their names and the pages of HTML that they show."""
    names, pages = {}, []
    for cell in cells:
        if cell["cell_type"] == "code":
            shown = value_of("".join(cell["source"]), names)
            if hasattr(shown, "_repr_html_"):
                pages.append(shown._repr_html_())
    return names, pages


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # shipped configurations are found from anywhere
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_it_is_kept_without_outputs():
    assert [cell for cell in read() if cell.get("outputs") or cell.get("execution_count")] == []


def test_cells_that_compute_by_formula_run(here, capsys):
    cells = read()
    first = next(number for number, cell in enumerate(cells) if COMPILES in "".join(cell["source"]))
    names, pages = run(cells[:first])
    assert len(pages) == 3
    assert all("<table" in page for page in pages)
    assert names["faster"].seconds < names["step"].seconds
    assert names["proof"].answer("configuration").standing == "proved"
    assert "did you mean 'pipeline_stage'?" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_cells_run(here):
    names, pages = run(read())
    assert len(pages) == 5
    assert names["checked"].ok
