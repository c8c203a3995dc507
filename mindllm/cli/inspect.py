"""What ``mindllm inspect`` does."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mindllm.cli.parsers.inspect import make_parser
from mindllm.command import run_command
from mindllm.compiled.inspect.inspection import Inspection
from mindllm.compiled.inspect.source import Inspected, compile_run, read_graph
from mindllm.config import load_config
from mindllm.errors import UserError
from mindllm.terminal.console import output, print_json
from mindllm.terminal.render import drawn, show

ANSWERS: dict[str, Callable[[Inspection, Any], Any]] = {
    "summary": lambda graph, options: graph.modules(options.depth),
    "show": lambda graph, options: graph.show(options.scope, options.all),
    "comm": lambda graph, options: graph.communication(options.each),
    "redundant": lambda graph, options: graph.redundant(),
    "recompute": lambda graph, options: graph.recomputation(),
}
FILES: dict[str, Callable[[Inspection, Path], None]] = {"graph": Inspection.write_page, "save": Inspection.save}


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints what one command says of a graph; returns the exit code."""
    parser = make_parser()
    options, overrides = parser.parse_known_args(arguments)
    if overrides and not options.config:
        parser.error(f"unrecognized arguments: {' '.join(overrides)}")
    if options.command == "diff":
        first = Inspection(read_graph(Path(options.first)))
        show(first.differences(Inspection(_graph(options, overrides))), options.json)
        return 0
    graph = Inspection(_graph(options, overrides))
    if options.command in FILES:
        FILES[options.command](graph, options.output)
        print_json({"written": str(options.output)}) if options.json else output.print(f"wrote {options.output}")
    else:
        show(ANSWERS[options.command](graph, options), options.json)
    return 0


def _graph(options: argparse.Namespace, overrides: Sequence[str]) -> Inspected:
    if (options.graph is None) == (options.config is None):
        given = f"{options.graph} and --config {options.config} are given" if options.config else "nothing is given"
        raise UserError(f"{given}; name a graph, or a run with --config YAML, whose keys are written as --key=value")
    if options.config:
        config = load_config(options.config, overrides)
        with drawn() as progress:
            return compile_run(config, options.rank, options.config, progress)
    return read_graph(options.graph)


if __name__ == "__main__":
    run_command(main)
