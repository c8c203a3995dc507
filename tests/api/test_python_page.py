"""Every example of docs/python.md runs, in the order of the page and in one process."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from kept_programs_here import unpacked

PAGE = Path(__file__).parents[2] / "docs" / "python.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
COMPILES = "## Dry run"  # from here on the examples have MindSpore compile, which takes minutes


@pytest.fixture
def here(workplace, tmp_path, monkeypatch):
    """A working directory with a corpus, what was kept of programs, and nothing that was compiled before."""
    for name, kept in {"output_a": "mlp_a", "cluster": "mlp_cluster", "single": "mlp_single"}.items():
        unpacked(kept, tmp_path).rename(tmp_path / name)
    (tmp_path / "data").symlink_to(workplace / "data")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def examples(until: int) -> Iterator[str]:
    """Yield the examples before a place of the page, each after as many empty lines as a traceback needs to name the page's."""
    text = PAGE.read_text(encoding="utf-8")
    for found in BLOCK.finditer(text, 0, until):
        yield "\n" * text[: found.start(1)].count("\n") + found.group(1)


def run(until: int) -> None:
    """Run the examples before a place of the page with the same names."""
    names: dict[str, object] = {}
    for example in examples(until):
        exec(compile(example, str(PAGE), "exec"), names)


def test_the_examples_that_compute_by_formula_run(here, capsys):
    run(PAGE.read_text(encoding="utf-8").index(COMPILES))
    shown = capsys.readouterr().out
    for expected in ("model FLOPs utilisation", "lower bound of all plans", "strategies", "what is proved"):
        assert expected in shown


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_examples_run(here, capsys):
    run(len(PAGE.read_text(encoding="utf-8")))
    shown = capsys.readouterr().out
    for expected in ("MindSpore's dry run reports", "all ranks match", "exchanges", "3 steps", "nats/token"):
        assert expected in shown
