"""Renders docs/what_is_proved.yaml as Markdown: a table per group, one row per claim.

A claim stands in the table only with tests that exist: files, directories, patterns of files, or node ids of pytest.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mindllm.errors import UserError

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "docs" / "what_is_proved.yaml"
FORMS = "mindllm/verify/forms"
KEYS = {"claim", "holds", "tests", "forms", "pages"}
INTRODUCTION = """\
# What works, and what proves it

Written by `python -m toolkit.what_is_proved` from `docs/what_is_proved.yaml`; do not edit it. A row needs tests that exist:
without them it is refused. *Forms* are small runs below `mindllm/verify/forms`: all of their ranks are executed and compared
with one device, within 2e-6.

Slow tests are not part of `scripts/test.sh`: `bash scripts/test.sh -m slow`. While you work,
`pytest -m "not slow and not compiles"` runs what needs no compiler of MindSpore. Properties are tested with the same inputs at
every run; `HYPOTHESIS_PROFILE=search` draws 1000 new ones. The test extra brings PyTorch (the CPU build, if your index has
one) and transformers, as the other side of the comparisons; mindllm itself uses neither.
"""


def render_page(table: dict[str, Any], root: Path = ROOT) -> str:
    """Return the page of a table.

    Raises:
        UserError: a row without tests, or a test, form or page that is not there below ``root``.
    """
    parts = [INTRODUCTION]
    for group in table["proved"]:
        rows = [_row(row, root) for row in group["rows"]]
        parts += [f"## {group['group']}", "", "| claim | how far | proved by |", "|---|---|---|", *rows, ""]
    rows = [f"| {row['claim']} | {row['why']} |" for row in table["not_proved"]]
    parts += ["## Not proved", "", "| | why |", "|---|---|", *rows]
    return "\n".join(parts) + "\n"


def _row(row: dict[str, Any], root: Path) -> str:
    for key in sorted(row.keys() - KEYS):
        raise UserError(f"{TABLE.name}: {row['claim']!r}: unknown key {key!r}; write one of {', '.join(sorted(KEYS))}")
    if not row.get("tests"):
        raise UserError(f"{TABLE.name}: {row['claim']!r}: no tests; name one, or move the row to not_proved")
    for message in missing(row, root):
        raise UserError(f"{TABLE.name}: {row['claim']!r}: {message}")
    proofs = [f"`{test}`{f': {shows}' if shows else ''}" for test, shows in row["tests"].items()]
    proofs += [f"form `{form}`" for form in row.get("forms", ())]
    proofs += [f"[{Path(page).name}]({page})" for page in row.get("pages", ())]
    return f"| {row['claim']} | {row['holds']} | {'; '.join(proofs)} |"


def missing(row: dict[str, Any], root: Path) -> Iterator[str]:
    """Yield what a row names and is not there: tests, forms, pages."""
    for test in row["tests"]:
        file, *names = test.split("::")
        if file.split("/")[0] != "tests" or not any(root.glob(file)):
            yield f"{file} does not exist"
        elif names and not _defines(root / file, names):
            yield f"{file} has no {'::'.join(names)}"
    for form in row.get("forms", ()):
        if not any((root / FORMS).glob(form)):
            yield f"{FORMS}/{form} does not exist"
    for page in row.get("pages", ()):
        if not (root / "docs" / page).exists():
            yield f"docs/{page} does not exist"


def _defines(file: Path, names: Sequence[str]) -> bool:
    """Whether a file defines a function, or a class with one."""
    body: list[ast.stmt] = ast.parse(file.read_text(encoding="utf-8")).body
    for name in names:
        found = [node for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name]
        if not found:
            return False
        body = found[0].body
    return True
