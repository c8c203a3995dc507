"""Every example of docs/python.md runs, in the order of the page and in one process."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "python.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def test_the_examples_of_the_page_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = PAGE.read_text(encoding="utf-8")
    names = {}
    for found in BLOCK.finditer(text):
        lines = "\n" * text[: found.start(1)].count("\n")  # so that a traceback names lines of the page
        exec(compile(lines + found.group(1), str(PAGE), "exec"), names)
    assert "model FLOPs utilisation" in capsys.readouterr().out
