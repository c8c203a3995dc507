"""Every example of the Python pages runs, in the order of its page and in one process."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from kept_programs_here import unpacked

DOCS = Path(__file__).parents[2] / "docs"
ESTIMATED = ("python", "python_planning")
COMPILED = "python_runs"  # has MindSpore compile, which takes minutes
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.fixture
def here(workplace, tmp_path, monkeypatch):
    """A working directory with a corpus, what was kept of programs, and nothing that was compiled before."""
    for name, kept in {"output_a": "mlp_a", "cluster": "mlp_cluster", "single": "mlp_single"}.items():
        unpacked(kept, tmp_path).rename(tmp_path / name)
    (tmp_path / "data").symlink_to(workplace / "data")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def examples(page: Path) -> Iterator[str]:
    """Yield the examples of a page, each after as many empty lines as a traceback needs to name the page's."""
    text = page.read_text(encoding="utf-8")
    for found in BLOCK.finditer(text):
        yield "\n" * text[: found.start(1)].count("\n") + found.group(1)


def run(name: str) -> None:
    """Run the examples of a page with the same names."""
    page = DOCS / f"{name}.md"
    names: dict[str, object] = {}
    for example in examples(page):
        exec(compile(example, str(page), "exec"), names)


def test_the_examples_that_compute_by_formula_run(here, capsys):
    for page in ESTIMATED:
        run(page)
    shown = capsys.readouterr().out
    for expected in ("model FLOPs utilisation", "lower bound of all plans", "strategies", "what is proved"):
        assert expected in shown


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_examples_that_compile_run(here, capsys):
    run(COMPILED)
    shown = capsys.readouterr().out
    for expected in ("MindSpore's dry run reports", "all ranks match", "exchanges", "3 steps", "nats/token"):
        assert expected in shown
