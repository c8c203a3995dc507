"""The command line ``python -m toolkit.benchmark.sweep``."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from mindllm.command import CommandParser, output_directory, output_file, run_command
from mindllm.config import RunConfig
from mindllm.errors import CheckFailed, UserError
from mindllm.extras import install_hint
from mindllm.files import atomic_open
from mindllm.terminal.console import error_console, output
from mindllm.terminal.tables import Table, figures, texts
from toolkit.benchmark.report import write_markdown
from toolkit.benchmark.sweep.figures import COLUMNS
from toolkit.benchmark.sweep.means import mean_rows
from toolkit.benchmark.sweep.picture import draw
from toolkit.benchmark.sweep.plan import SWEEPS, Sweep, points, read_sweep
from toolkit.benchmark.sweep.run import (
    FAILED,
    OK,
    OUT_OF_MEMORY,
    RESULTS,
    TIMED_OUT,
    Result,
    run_sweep,
    synthetic_text,
)
from toolkit.benchmark.sweep.tables import headings, html, markdown, reasons_of, rows_of

EXAMPLES = """example:
  python -m toolkit.benchmark.sweep --config batch_size
  python -m toolkit.benchmark.sweep --config sweep.yaml --output output_sweep/mine --again failed
  python -m toolkit.benchmark.sweep --config sweep.yaml --list
"""
PAGES = {"table.md": markdown, "table.html": html}
STATUSES = (FAILED, TIMED_OUT, OUT_OF_MEMORY)  # refused ones are looked at again at every start


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what has not been run yet, and writes the table; returns the exit code."""
    options = make_parser().parse_args(arguments)
    sweep, source = read_sweep(Path(options.config))
    directory = Path(options.output) / source.stem
    synthetic = synthetic_text(directory) if sweep.synthetic and not options.list else None
    found = list(points(sweep, source, synthetic))
    columns = sweep.columns or COLUMNS[sweep.mode]
    if options.list:
        rows = [(*point.labels.values(), point.refused) for point in found]
        output.print(Table(sweep.title, texts(*headings(list(sweep.axes), []), "refused"), rows))
        return 0
    if not any(isinstance(point.config, RunConfig) for point in found):
        raise UserError(f"{source}: no point of the sweep is a run: {found[0].refused}")
    results = run_sweep(sweep, found, directory, error_console.print, options.again)
    shown = mean_rows(sweep.mean_over, results) if sweep.mean_over else results
    _show(sweep, columns, shown, directory)
    if options.markdown is not None:
        command = shlex.join(["python", "-m", "toolkit.benchmark.sweep", *(arguments or sys.argv[1:])])
        names = headings(sweep.shown_axes, columns)
        table = ("Results", names, list(rows_of(sweep.shown_axes, columns, shown)))
        write_markdown(options.markdown, sweep.title, sweep.description, command, [table])
    if failed := [result for result in results if result["status"] in (FAILED, TIMED_OUT)]:
        raise CheckFailed(f"{len(failed)} of {len(results)} points failed; {failed[0]['why']}")
    if not any(result["status"] == OK for result in results):
        raise CheckFailed(f"no point of {len(results)} has figures; {results[0]['status']}: {results[0]['why']}")
    return 0


def make_parser() -> CommandParser:
    """Returns the parser of the command line."""
    shipped = ", ".join(sorted(path.stem for path in SWEEPS.glob("*.yaml")))
    parser = CommandParser(
        prog="python -m toolkit.benchmark.sweep",
        description="A run YAML under all combinations of changes of its keys, every one a process of its own: speed and memory "
        "here (mode measure), memory and time on devices that are not (dry), losses and scores (tune). Points that are "
        "finished are not repeated. Exit code 0: done, 3: a point failed, 2: wrong input. Shipped: " + shipped,
        epilog=EXAMPLES,
    )
    parser.add_argument("--config", required=True, metavar="YAML", help="a sweep, or the name of a shipped one")
    parser.add_argument(
        "--output",
        type=output_directory,
        default="output_sweep",
        metavar="DIR",
        help="for results (default: %(default)s)",
    )
    parser.add_argument(
        "--again",
        nargs="+",
        choices=STATUSES,
        default=[],
        metavar="STATUS",
        help=f"run these again: {', '.join(STATUSES)}",
    )
    parser.add_argument(
        "--markdown", type=output_file, metavar="FILE", help="write the table, with this command, to FILE as well"
    )
    parser.add_argument("--list", action="store_true", help="shows the points, and which of them are no runs")
    return parser


def _show(sweep: Sweep, columns: Sequence[str], results: Sequence[Result], directory: Path) -> None:
    """Prints the table and writes it as pages and as a picture."""
    axes = sweep.shown_axes
    for name, render in PAGES.items():
        with atomic_open(directory / name) as file:
            file.write(render(sweep.title, axes, columns, results))
    written = [*PAGES, RESULTS, *_picture(sweep.title, axes, columns, results, directory / "table.png")]
    names = headings(axes, columns)
    rows = rows_of(axes, columns, results)
    output.print(Table(sweep.title, [*texts(*names[: len(axes)]), *figures(*names[len(axes) :])], rows, keys=len(axes)))
    for reason in reasons_of(results):
        output.print(f"  {reason}")
    output.print(f"{directory}: {', '.join(written)}", markup=False)


def _picture(title: str, axes: list[str], columns: Sequence[str], results: Sequence[Result], path: Path) -> list[str]:
    """Writes the picture where there is something to draw, and matplotlib; returns its name."""
    try:
        content = draw(title, axes, columns, results)
    except ModuleNotFoundError as error:
        error_console.print(f"no picture: {install_hint(error)}")
        return []
    if not content:
        return []
    with atomic_open(path, "wb") as file:
        file.write(content)
    return [path.name]


if __name__ == "__main__":
    run_command(main)
