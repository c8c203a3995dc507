"""``mindllm inspect``: what is in the compiled graph of a rank."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindllm.command import CommandParser, output_file, run_command
from mindllm.errors import UserError
from mindllm.jobs.memory import add_memory_option
from mindllm.terminal.console import output, print_json
from mindllm.terminal.render import drawn, show

if TYPE_CHECKING:
    from mindllm.compiled.inspect.inspection import Inspection
    from mindllm.compiled.inspect.source import Inspected

EXAMPLE = """examples:
  %(prog)s summary --config configs/llama2/pretrain_llama2_13b.yaml --rank 8
  %(prog)s save --config configs/llama2/pretrain_llama2_13b.yaml --rank 8 --output rank8.graph
  %(prog)s comm rank8.graph
  %(prog)s redundant graph/rank_0/21_validate_0082.ir

Three kinds of graph are read: what `save` keeps, MindIR, and the text (.ir) that MindSpore writes with
context.save_graphs; of the latter take the file named …_validate_….ir. With --config the rank is compiled on the
spot, without a device; further options change keys of the configuration, as with run_llm.py.
"""
POSITIONALS = {
    "scope": "a cell such as model.layers.0.feed_forward, the beginning of a full name, or a pattern with *",
    "first": "the graph, or a run's YAML, to compare with; keys are of the second one",
}
RUNS = (".yaml", ".yml")
ANSWERS: dict[str, Callable[[Inspection, Any], Any]] = {
    "summary": lambda graph, options: graph.modules(options.depth),
    "show": lambda graph, options: graph.show(options.scope, options.all),
    "comm": lambda graph, options: graph.communication(options.each),
    "redundant": lambda graph, options: graph.redundant(),
    "recompute": lambda graph, options: graph.recomputation(),
}
FILES: dict[str, Callable[[Inspection, Path], None]] = {
    "graph": lambda graph, place: graph.write_page(place),
    "save": lambda graph, place: graph.save(place),
}


def make_parser() -> CommandParser:
    """Returns the parser of the command line."""
    parser = CommandParser(
        prog="mindllm inspect",
        description="Looks into the compiled graph of one rank: operations and memory by module, communication and its causes, "
        "layout changes nobody asked for, and the recomputation that really happens.",
        epilog=EXAMPLE,
    )
    commands = parser.add_subparsers(dest="command", required=True, parser_class=CommandParser, metavar="COMMAND")
    summary = _command(commands, "summary", "operators, FLOPs, bytes and parameters by module", "rank8.graph")
    summary.add_argument("--depth", type=int, default=4, help="levels of cells that are told apart (default 4)")
    show = _command(commands, "show", "the text of one part", "model.layers.0.feed_forward rank8.graph", ["scope"])
    show.add_argument("--all", action="store_true", help="also operators that only order or pass on others")
    comm = _command(commands, "comm", "every exchange with other ranks, and its cause", "rank8.graph")
    comm.add_argument("--each", action="store_true", help="one row for each, where alike ones share a row otherwise")
    _command(commands, "redundant", "layout changes nobody asked for, with the fix of each", "rank8.graph")
    text = "what recomputation was asked for, really happens and saves, and why a pattern has no effect"
    _command(commands, "recompute", text, "--config run.yaml --rank 8")
    _command(commands, "diff", "what differs between two graphs", "before.graph after.graph", ["first"])
    page = _command(commands, "graph", "a page to look at, as one HTML file", "rank8.graph --output rank8.html")
    page.add_argument(
        "--output", type=output_file, default="graph.html", metavar="FILE", help="file to write (graph.html)"
    )
    keep = _command(
        commands,
        "save",
        "the compiled graph, kept in a file for the other commands",
        "--config run.yaml --output rank8.graph",
    )
    keep.add_argument(
        "--output", type=output_file, default="rank.graph", metavar="FILE", help="file to write (rank.graph)"
    )
    return parser


def _command(commands, name: str, text: str, example: str, before: Sequence[str] = ()) -> argparse.ArgumentParser:
    epilog = f"example: %(prog)s {example}"
    parser = commands.add_parser(
        name, help=text, description=f"{text[0].upper()}{text[1:]}.", epilog=epilog, takes_keys=True
    )
    for argument in before:
        parser.add_argument(argument, metavar=argument.upper(), help=POSITIONALS[argument])
    parser.add_argument(
        "graph",
        nargs="?",
        type=Path,
        metavar="GRAPH",
        help="a kept graph, MindIR or .ir, or its directory; or a run's YAML",
    )
    parser.add_argument("--config", metavar="YAML", help="compile this run instead of reading a graph")
    parser.add_argument("--rank", type=int, default=0, metavar="R", help="global rank to compile (default 0)")
    add_memory_option(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints what one command says of a graph; returns the exit code."""
    parser = make_parser()
    options, overrides = parser.parse_known_args(arguments)

    from mindllm.compiled.inspect.inspection import Inspection

    if options.config is None and options.graph is not None and options.graph.suffix in RUNS:
        options.config, options.graph = str(options.graph), None
    if overrides and not options.config:
        parser.error(f"unrecognized arguments: {' '.join(overrides)}")
    if options.command == "diff":
        first = Inspection(_inspected(options.first, Path(options.first).suffix in RUNS, options.rank))
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
        raise UserError(f"{given}; name a graph, or the YAML of a run, whose keys are written as --key=value")
    return _inspected(options.config or options.graph, options.config is not None, options.rank, overrides)


def _inspected(given: str | Path, is_run: bool, rank: int, overrides: Sequence[str] = ()) -> Inspected:
    from mindllm.compiled.inspect.source import compile_run, read_graph
    from mindllm.config import load_config

    if not is_run:
        return read_graph(Path(given))
    config = load_config(given, overrides)
    with drawn() as progress:
        return compile_run(config, rank, str(given), progress)


if __name__ == "__main__":
    run_command(main)
