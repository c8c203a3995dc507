"""The command line ``python -m toolkit.ir_inspect``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from mindllm.command import CommandParser, output_file, run_command
from mindllm.compiled.inspect.source import Inspected, compile_config, read_graph
from mindllm.console import output, print_json
from mindllm.errors import UserError
from mindllm.host_memory import add_memory_option

EXAMPLE = """examples:
  python -m toolkit.ir_inspect summary --config configs/llama2/pretrain_llama2_13b.yaml --rank 8
  python -m toolkit.ir_inspect save --config configs/llama2/pretrain_llama2_13b.yaml --rank 8 --output rank8.graph
  python -m toolkit.ir_inspect comm rank8.graph
  python -m toolkit.ir_inspect redundant graph/rank_0/21_validate_0082.ir

Three kinds of graph are read: what `save` keeps, MindIR, and the text (.ir) that MindSpore writes with
context.save_graphs; of the latter take the file named …_validate_….ir. With --config the rank is compiled on the
spot, without a device; further options change keys of the configuration, as with run_llm.py.
"""


POSITIONALS = {
    "scope": "a cell such as model.layers.0.feed_forward, the beginning of a full name, or a pattern with *",
    "first": "the graph to compare with",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints what one command says of a graph; returns the exit code."""
    parser = make_parser()
    options, overrides = parser.parse_known_args(arguments)
    if overrides and not options.config:
        parser.error(f"unrecognized arguments: {' '.join(overrides)}")
    options.run(options, overrides)
    return 0


def make_parser() -> CommandParser:
    """Returns the parser of the command line."""
    parser = CommandParser(
        prog="python -m toolkit.ir_inspect",
        description="Looks into the compiled graph of one rank: operations and memory by module, communication and its causes, "
        "layout changes nobody asked for, and the recomputation that really happens.",
        epilog=EXAMPLE,
    )
    commands = parser.add_subparsers(dest="command", required=True, parser_class=CommandParser, metavar="COMMAND")
    summary = _command(commands, "summary", _summary, "operators, FLOPs, bytes and parameters by module", "rank8.graph")
    summary.add_argument("--depth", type=int, default=4, help="levels of cells that are told apart (default 4)")
    show = _command(
        commands, "show", _show, "the text of one part", "model.layers.0.feed_forward rank8.graph", ["scope"]
    )
    show.add_argument("--all", action="store_true", help="also operators that only order or pass on others")
    comm = _command(commands, "comm", _comm, "every exchange with other ranks, and its cause", "rank8.graph")
    comm.add_argument("--each", action="store_true", help="one row for each, where alike ones share a row otherwise")
    _command(commands, "redundant", _redundant, "layout changes nobody asked for, with the fix of each", "rank8.graph")
    text = "what recomputation was asked for, really happens and saves, and why a pattern has no effect"
    _command(commands, "recompute", _recompute, text, "--config run.yaml --rank 8")
    _command(commands, "diff", _diff, "what differs between two graphs", "before.graph after.graph", ["first"])
    page = _command(commands, "graph", _page, "a page to look at, as one HTML file", "rank8.graph --output rank8.html")
    page.add_argument("--output", type=output_file, default="graph.html", metavar="FILE", help="default graph.html")
    keep = _command(
        commands,
        "save",
        _save,
        "the compiled graph, kept in a file for the other commands",
        "--config run.yaml --output rank8.graph",
    )
    keep.add_argument("--output", type=output_file, default="rank.graph", metavar="FILE", help="default rank.graph")
    return parser


def _command(commands, name: str, run, text: str, example: str, before: Sequence[str] = ()) -> argparse.ArgumentParser:
    epilog = f"example: python -m toolkit.ir_inspect {name} {example}"
    parser = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.", epilog=epilog)
    for argument in before:
        parser.add_argument(argument, metavar=argument.upper(), help=POSITIONALS[argument])
    parser.add_argument(
        "graph", nargs="?", type=Path, metavar="GRAPH", help="a kept graph, MindIR or .ir, or its directory"
    )
    parser.add_argument("--config", metavar="YAML", help="compile this run instead of reading a graph")
    parser.add_argument("--rank", type=int, default=0, metavar="R", help="global rank to compile (default 0)")
    add_memory_option(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)
    return parser


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


if __name__ == "__main__":
    run_command(main)
