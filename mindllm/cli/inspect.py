"""``mindllm inspect``: operators, memory and communication of a rank's compiled graph."""

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

EXAMPLE = """examples:
  %(prog)s summary configs/llama2/pretrain_llama2_13b.yaml --rank 8
  %(prog)s save configs/llama2/pretrain_llama2_13b.yaml --rank 8 --output rank8.graph
  %(prog)s comm rank8.graph
  %(prog)s redundant graph/rank_0/21_validate_0082.ir

A YAML is compiled for the rank, without a device; its keys are options. Graphs are those of `save`, MindIR, and texts
(.ir) of MindSpore's context.save_graphs, of which the file ..._validate_....ir is the last.
"""
POSITIONALS = {
    "scope": "cell such as model.layers.0.feed_forward, prefix of a full name, or pattern with *",
    "first": "graph or YAML to compare with; keys are those of the second one",
}
ANSWERS: dict[str, Callable[[Inspection, Any], Any]] = {
    "summary": lambda graph, options: graph.modules(options.depth),
    "show": lambda graph, options: graph.show(options.scope, options.all),
    "comm": lambda graph, options: graph.communication(options.each),
    "redundant": lambda graph, options: graph.redundant(),
    "recompute": lambda graph, options: graph.recomputation(),
}
FILES: dict[str, Callable[[Inspection, Path], None]] = {
    "graph": lambda graph, path: graph.write_page(path),
    "save": lambda graph, path: graph.save(path),
}


def make_parser() -> CommandParser:
    """Return the parser of the command line."""
    parser = CommandParser(
        prog="mindllm inspect",
        description="Analyzes the compiled graph of one rank: operators and memory by module, communication and its causes, "
        "unrequested layout changes, and effective recomputation.",
        epilog=EXAMPLE,
    )
    commands = parser.add_subparsers(dest="command", required=True, parser_class=CommandParser, metavar="COMMAND")
    summary = _command(commands, "summary", "operators, FLOPs, bytes and parameters by module", "rank8.graph")
    summary.add_argument("--depth", type=int, default=4, help="levels of nested cells (default: 4)")
    text = _command(commands, "show", "text of one part", "model.layers.0.feed_forward rank8.graph", ["scope"])
    text.add_argument("--all", action="store_true", help="include operators that only order or forward others")
    comm = _command(commands, "comm", "communication operators and their causes", "rank8.graph")
    comm.add_argument("--each", action="store_true", help="print one row per operator instead of merging equal ones")
    _command(commands, "redundant", "unrequested layout changes and their fixes", "rank8.graph")
    recompute = "requested and effective recomputation, memory saved, and patterns without effect"
    _command(commands, "recompute", recompute, "run.yaml --rank 8")
    _command(commands, "diff", "differences between two graphs", "before.graph after.graph", ["first"])
    page = _command(commands, "graph", "interactive page of the graph (HTML)", "rank8.graph --output rank8.html")
    save = _command(commands, "save", "save the compiled graph for other commands", "run.yaml --output rank8.graph")
    for command, name in ((page, "graph.html"), (save, "rank.graph")):
        file = "file to write (default: %(default)s)"
        command.add_argument("--output", type=output_file, default=name, metavar="FILE", help=file)
    return parser


def _command(commands, name: str, text: str, example: str, before: Sequence[str] = ()) -> argparse.ArgumentParser:
    description = f"{text[0].upper()}{text[1:]}."
    epilog = f"example:\n  %(prog)s {example}"
    parser = commands.add_parser(name, help=text, description=description, epilog=epilog, takes_keys=True)
    for argument in before:
        parser.add_argument(argument, metavar=argument.upper(), help=POSITIONALS[argument])
    graph = "saved graph, MindIR, .ir, or a directory with one; or the YAML of a run"
    parser.add_argument("graph", type=Path, metavar="GRAPH|RUN", help=graph)
    parser.add_argument("--rank", type=int, default=0, metavar="R", help="global rank to compile (default: 0)")
    add_memory_option(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the answer of one command about a graph; return the exit code."""
    options, overrides = make_parser().parse_known_args(arguments)
    if options.command == "diff":
        first = _inspect(Path(options.first), options.rank)
        show(first.differences(_inspect(options.graph, options.rank, overrides)), options.json)
        return 0
    graph = _inspect(options.graph, options.rank, overrides)
    if options.command in FILES:
        FILES[options.command](graph, options.output)
        print_json({"written": str(options.output)}) if options.json else output.print(f"wrote {options.output}")
    else:
        show(ANSWERS[options.command](graph, options), options.json)
    return 0


def _inspect(path: Path, rank: int, overrides: Sequence[str] = ()) -> Inspection:
    """Load a graph, or compile it if the path is a run."""
    from mindllm import api
    from mindllm.config import is_hugging_face

    if path.suffix not in (".yaml", ".yml") and not is_hugging_face(path):
        if overrides:
            raise UserError(f"{overrides[0]}: unknown option; a graph has no keys of a run")
        return api.inspect(path)
    config = api.load_config(path, overrides)
    with drawn() as progress:
        return api.inspect(config, rank=rank, name=str(path), progress=progress)


if __name__ == "__main__":
    run_command(main)
