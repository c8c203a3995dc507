"""What ``mindllm inspect`` does."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from mindllm.cli.parsers.inspect import make_parser
from mindllm.command import run_command
from mindllm.compiled.inspect.source import Inspected, compile_config, read_graph
from mindllm.console import output, print_json
from mindllm.errors import UserError


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints what one command says of a graph; returns the exit code."""
    parser = make_parser()
    options, overrides = parser.parse_known_args(arguments)
    if overrides and not options.config:
        parser.error(f"unrecognized arguments: {' '.join(overrides)}")
    COMMANDS[options.command](options, overrides)
    return 0


def _graph(options: argparse.Namespace, overrides: Sequence[str]) -> Inspected:
    if (options.graph is None) == (options.config is None):
        given = f"{options.graph} and --config {options.config} are given" if options.config else "nothing is given"
        raise UserError(f"{given}; name a graph, or a run with --config YAML, whose keys are written as --key=value")
    if options.config:
        return compile_config(options.config, options.rank, overrides)
    return read_graph(options.graph)


def _summary(options: argparse.Namespace, overrides: Sequence[str]) -> None:
    from mindllm.compiled.inspect.summary import print_summary, summarise

    summary = summarise(_graph(options, overrides).graph, options.depth)
    (print_json if options.json else print_summary)(summary)


def _show(options: argparse.Namespace, overrides: Sequence[str]) -> None:
    from mindllm.compiled.inspect.show import show

    lines = list(show(_graph(options, overrides).graph, options.scope, everything=options.all))
    if options.json:
        print_json({"lines": lines})
    else:
        output.print("\n".join(lines))


def _comm(options: argparse.Namespace, overrides: Sequence[str]) -> None:
    from mindllm.compiled.inspect.comm import as_json, exchanges, print_exchanges

    found = exchanges(_graph(options, overrides).graph)
    if options.json:
        print_json(as_json(found))
    else:
        print_exchanges(found, options.each)


def _redundant(options: argparse.Namespace, overrides: Sequence[str]) -> None:
    from mindllm.compiled.inspect.redundant import as_json, layout_changes, print_changes

    changes = layout_changes(_graph(options, overrides).graph)
    if options.json:
        print_json(as_json(changes))
    else:
        print_changes(changes)


def _recompute(options: argparse.Namespace, overrides: Sequence[str]) -> None:
    from mindllm.compiled.inspect.recompute import as_json, print_recomputation, recomputation

    found = recomputation(_graph(options, overrides))
    if options.json:
        print_json(as_json(found))
    else:
        print_recomputation(found)


def _diff(options: argparse.Namespace, overrides: Sequence[str]) -> None:
    from mindllm.compiled.inspect.diff import compare, print_comparison

    first, second = read_graph(Path(options.first)), _graph(options, overrides)
    found = compare(first.graph, second.graph)
    if options.json:
        print_json(found)
    else:
        print_comparison(found, (first.name, second.name))


def _page(options: argparse.Namespace, overrides: Sequence[str]) -> None:
    from mindllm.compiled.inspect.page import write_page

    inspected = _graph(options, overrides)
    write_page(inspected.graph, inspected.name, options.output)
    print_json({"written": str(options.output)}) if options.json else output.print(f"wrote {options.output}")


def _save(options: argparse.Namespace, overrides: Sequence[str]) -> None:
    from mindllm.compiled.graph.file import save

    inspected = _graph(options, overrides)
    if not inspected.graph.mind_ir:
        raise UserError(f"{inspected.name}: a text graph cannot be kept; it is readable as it is")
    save(inspected.graph, options.output)
    print_json({"written": str(options.output)}) if options.json else output.print(f"wrote {options.output}")


COMMANDS = {
    "summary": _summary,
    "show": _show,
    "comm": _comm,
    "redundant": _redundant,
    "recompute": _recompute,
    "diff": _diff,
    "graph": _page,
    "save": _save,
}


if __name__ == "__main__":
    run_command(main)
