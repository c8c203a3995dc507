"""Size of the code per package: files, lines, statements, functions, helpers that are called once, and import closures.

``python -m toolkit.benchmark.code_size`` counts ``mindllm/``; other directories can be named to compare with. Statements are
counted next to lines, so that removing docstrings and comments does not look like a saving.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from mindllm.command import CommandParser, output_file, run_command
from mindllm.terminal.console import output
from mindllm.terminal.tables import Column, Table
from toolkit.benchmark.report import write_markdown

ROOT = Path(__file__).resolve().parents[2]
ENTRY_POINTS = {  # what is loaded -> the program that loads it
    "import mindllm": "import mindllm",
    "loading a plain YAML": "from mindllm.config import load_config; load_config('configs/llama2/pretrain_llama2_7b.yaml')",
    "mindllm.run.training": "import mindllm.run.training",
    "mindllm.train.step": "import mindllm.train.step",
}
SHORT = 6  # lines of a helper that is shorter to read in place
COLUMNS = (
    "package",
    "files",
    "lines",
    "statements",
    "functions",
    "median length",
    "p90",
    "called once",
    "of them short",
)
PAGE = """Sizes of the packages of `mindllm/`. *Functions* includes methods. *Called once* is the share of functions that
are private (a leading underscore) and referenced at a single place; *of them short* is the share with at most 6 lines. Lengths
are lines from `def` to the end, docstring included."""


@dataclass
class Package:
    """Counts of the files of a package."""

    name: str
    files: int = 0
    lines: int = 0
    statements: int = 0
    lengths: list[int] = field(default_factory=list)
    called_once: list[int] = field(default_factory=list)  # their lengths

    def add(self, other: Package) -> None:
        """Add the counts of another package."""
        self.files += other.files
        self.lines += other.lines
        self.statements += other.statements
        self.lengths += other.lengths
        self.called_once += other.called_once

    def row(self) -> list[str]:
        """Return the cells of the table."""
        count = len(self.lengths)
        short = sum(length <= SHORT for length in self.called_once)
        shares = [f"{part / count:.1%}" if count else "-" for part in (len(self.called_once), short)]
        lengths = sorted(self.lengths) or [0]
        p90 = lengths[int(0.9 * (len(lengths) - 1))]
        sizes = (self.files, self.lines, self.statements, count, round(median(lengths)), p90)
        return [self.name, *(f"{size:,}" for size in sizes), *shares]


def count_packages(directory: Path) -> list[Package]:
    """Return the counts of each direct subdirectory of ``directory`` with Python files, largest first, then the total.

    Raises:
        SyntaxError: a file is not Python.
    """
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(directory.rglob("*.py"))}
    imported = Counter(name for tree in trees.values() for name in _imported_names(tree))
    packages: dict[str, Package] = {}
    for path, tree in trees.items():
        parts = path.relative_to(directory).parts
        name = parts[0] if len(parts) > 1 else "(top level)"
        package = packages.setdefault(name, Package(name))
        package.files += 1
        package.lines += len(path.read_text(encoding="utf-8").splitlines())
        package.statements += sum(isinstance(node, ast.stmt) and not _is_docstring(node) for node in ast.walk(tree))
        references = imported + Counter(_references(tree))
        for function in _functions(tree):
            length = (function.end_lineno or function.lineno) - function.lineno + 1
            package.lengths.append(length)
            if function.name.startswith("_") and not function.name.endswith("__") and references[function.name] == 1:
                package.called_once.append(length)
    total = Package("total")
    for package in packages.values():
        total.add(package)
    return [*sorted(packages.values(), key=lambda package: -package.lines), total]


def import_closure(program: str) -> dict[str, int]:
    """Return the lines of each ``mindllm`` file that ``program`` loads in a new process, by module name.

    Raises:
        CalledProcessError: the program fails.
    """
    report = "for name, module in list(sys.modules.items()): print(name, getattr(module, '__file__', None))"
    listing = subprocess.run(
        [sys.executable, "-c", f"import sys; {program}\n{report}"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    closure = {}
    for line in listing.stdout.splitlines():
        name, _, file = line.partition(" ")
        if name.split(".")[0] == "mindllm" and file.endswith(".py"):
            closure[name] = len(Path(file).read_text(encoding="utf-8").splitlines())
    return closure


def main(arguments: Sequence[str] | None = None) -> int:
    """Count, print the tables, and write the page if asked."""
    parser = CommandParser(prog="python -m toolkit.benchmark.code_size", description=__doc__)
    parser.add_argument("directories", nargs="*", type=Path, default=[ROOT / "mindllm"], metavar="DIR")
    parser.add_argument("--markdown", type=output_file, metavar="FILE", help="page to write")
    options = parser.parse_args(arguments)
    tables: list[tuple[str, Sequence[str], list[list[str]]]] = []
    for directory in options.directories:
        rows = [package.row() for package in count_packages(directory)]
        tables.append((f"Packages of {directory.name}", COLUMNS, rows))
    closures = []
    for name, program in ENTRY_POINTS.items():
        loaded = import_closure(program)
        closures.append([name, f"{len(loaded):,}", f"{sum(loaded.values()):,}"])
    tables.append(("Import closures", ("entry point", "files", "lines"), closures))
    for title, columns, rows in tables:
        table = Table(title, [Column(column, is_text=column == columns[0]) for column in columns])
        for row in rows:
            table.add_row(*row)
        output.print(table)
    if options.markdown:
        command = "python -m toolkit.benchmark.code_size --markdown docs/benchmarks/code_size.md"
        write_markdown(options.markdown, "Size of the code", PAGE, command, tables)
    return 0


def _functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def _references(tree: ast.AST) -> Iterator[str]:
    """Yield every name and attribute that is read."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr


def _imported_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from (alias.name for alias in node.names)


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


if __name__ == "__main__":
    run_command(main)
