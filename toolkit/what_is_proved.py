"""``python -m toolkit.what_is_proved``: writes docs/what_is_proved.md from the YAML beside it, or checks that it is up to date.

A claim stands in the table only with tests that exist: files, directories, patterns of files, or node ids of pytest.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from mindllm.command import CommandParser, output_file, run_command
from mindllm.errors import CheckFailed, UserError
from mindllm.files import atomic_open
from mindllm.terminal.console import output

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "docs" / "what_is_proved.yaml"
PAGE = Path("docs/what_is_proved.md")
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


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes or checks the page."""
    parser = CommandParser(
        prog="python -m toolkit.what_is_proved",
        description="Writes the page of what is proved, and by which tests, from docs/what_is_proved.yaml.",
        epilog="example:\n  python -m toolkit.what_is_proved --check",
    )
    parser.add_argument("--output", type=output_file, default=PAGE, help=f"the page (default: {PAGE})")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 3 if the page is out of date")
    options = parser.parse_args(arguments)
    page = render_page(yaml.safe_load(TABLE.read_text(encoding="utf-8")))
    if not options.check:
        with atomic_open(options.output) as file:
            file.write(page)
        output.print(f"wrote {options.output}")
    elif not options.output.is_file() or options.output.read_text(encoding="utf-8") != page:
        raise CheckFailed(f"{options.output} is not what {TABLE.name} says; run python -m toolkit.what_is_proved")


if __name__ == "__main__":
    run_command(main)
