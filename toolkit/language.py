"""Lint of names, docstrings, comments and messages: plain engineering English, as docs/writing.md explains.

``python -m toolkit.language`` checks every package that is not in :data:`UNCONVERTED`, and exits with 3 if it finds a problem.
Paths can be given to check other files; ``--counts`` prints the problems per package instead.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mindllm.command import CommandParser, run_command
from mindllm.terminal.console import output
from mindllm.terminal.tables import Column, Table

ROOT = Path(__file__).resolve().parents[1]
PAGE = "docs/writing.md"
CHECKED = ("mindllm", "toolkit")
UNCONVERTED = frozenset(
    {
        "mindllm",
        "mindllm/accept",
        "mindllm/architecture",
        "mindllm/cli",
        "mindllm/compiled",
        "mindllm/config",
        "mindllm/data",
        "mindllm/dry_run",
        "mindllm/evaluate",
        "mindllm/families",
        "mindllm/fetch",
        "mindllm/finetune",
        "mindllm/generate",
        "mindllm/jobs",
        "mindllm/launch",
        "mindllm/mindformers",
        "mindllm/models",
        "mindllm/parallel",
        "mindllm/planning",
        "mindllm/preflight",
        "mindllm/process",
        "mindllm/profiles",
        "mindllm/programs",
        "mindllm/prove",
        "mindllm/recipes",
        "mindllm/reduced_runs",
        "mindllm/schedules",
        "mindllm/strategies",
        "mindllm/terminal",
        "mindllm/timing",
        "mindllm/train",
        "mindllm/verify",
        "toolkit/benchmark",
        "toolkit/config_reference",
        "toolkit/what_is_proved",
    }
)
"""Packages that still have names and sentences of the old style. Remove a package from this list when it is rewritten."""

# Words that are not a name: they say how a value came about, and not what it is.
NAME_WORDS = (
    "told|said|says|found|kept|held|given|wanted|known|asked|beside|behind|anew|seldom|whoever|whose|theirs|nothing"
)
NAME = re.compile(rf"(^|_)({NAME_WORDS})(_|$)")
TERMS = re.compile("held_out")  # terms of the field with such a word

PHRASES = (
    "told|anew|once more|beside|whoever|manieth|is no|are no|none that|all the same|of its own|of their own|goes on|"
    "held to|held against|but for|at once"
)
PHRASE = re.compile(rf"\b({PHRASES})\b")
NOT_A_VERB = re.compile(
    r"^(The|A|An|What|Which|Whether|Who|Whose|Where|When|How|Those|That|These|This|Of|As|About|All|Both|Each|One|Only|None|No|Same)\b"
)


@dataclass(frozen=True)
class Problem:
    """A place that reads badly.

    Attributes:
        file: relative to the project.
        line: its number.
        kind: ``name``, ``phrase`` or ``docstring``.
        text: the name, the phrase, or the first line of the docstring.
    """

    file: str
    line: int
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.kind}: {self.text}"


def find_problems(path: Path) -> Iterator[Problem]:
    """Yield the problems of a Python file, by kind.

    Raises:
        SyntaxError: the file is not Python.
    """
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    file = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)
    for line, name in _names(tree):
        plain = name.strip("_").lower()
        if NAME.search(TERMS.sub("", plain)):
            yield Problem(file, line, "name", name)
    for line, text in _texts(source, tree):
        for match in PHRASE.finditer(text):
            yield Problem(file, line + text[: match.start()].count("\n"), "phrase", match.group())
    for node in ast.walk(tree):
        # Decorated functions include properties, whose docstring is a noun phrase.
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.decorator_list:
            docstring = ast.get_docstring(node) or ""
            if NOT_A_VERB.match(docstring):
                yield Problem(file, node.lineno, "docstring", docstring.splitlines()[0])


def python_files(directories: Sequence[Path]) -> Iterator[Path]:
    """Yield the Python files of directories, and files themselves, in order."""
    for path in directories:
        files = [path] if path.is_file() else sorted(path.rglob("*.py"))
        yield from (file for file in files if file != Path(__file__))  # this file lists the words


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the problems; return 3 if there are any."""
    parser = CommandParser(prog="python -m toolkit.language", description=__doc__)
    parser.add_argument(
        "paths", nargs="*", type=Path, metavar="PATH", help="files and directories; default: all converted ones"
    )
    parser.add_argument(
        "--counts", action="store_true", help="print the number of problems per package, unconverted ones too"
    )
    options = parser.parse_args(arguments)
    files = [*python_files(options.paths or [ROOT / name for name in CHECKED])]
    if options.counts:
        output.print(_count_table(files))
        return 0
    if not options.paths:
        files = [path for path in files if _package(path) not in UNCONVERTED]
    problems = [problem for path in files for problem in find_problems(path)]
    for problem in problems:
        output.print(str(problem))
    if problems:
        output.print(f"{len(problems)} names, phrases or docstrings to rewrite; see {PAGE}")
    return 3 if problems else 0


def _count_table(files: Sequence[Path]) -> Table:
    counts: dict[str, Counter[str]] = {}
    for path in files:
        count = counts.setdefault(_package(path), Counter())
        count["lines"] += len(path.read_text(encoding="utf-8").splitlines())
        count.update(problem.kind for problem in find_problems(path))
    columns = ("package", "lines", "names", "phrases", "docstrings")
    table = Table("Problems per package", [Column(column, is_text=column == "package") for column in columns])
    for package, count in sorted(counts.items()):
        table.add_row(package, *(f"{count[kind]:,}" for kind in ("lines", "name", "phrase", "docstring")))
    return table


def _package(path: Path) -> str:
    """Return the package of a file, such as ``mindllm/train``, or ``mindllm`` for files at the top."""
    if not path.is_relative_to(ROOT):
        return str(path.parent)
    parts = path.relative_to(ROOT).parts
    return "/".join(parts[:2]) if len(parts) > 2 else parts[0]


def _names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
            if not isinstance(node, ast.ClassDef):
                yield from ((argument.lineno, argument.arg) for argument in (*node.args.args, *node.args.kwonlyargs))
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id


def _texts(source: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield strings with a space, and comments, with the line they start at."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


if __name__ == "__main__":
    run_command(main)
