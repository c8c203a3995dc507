"""``mindllm configure``: find and prove a run for a network and devices."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mindllm.architecture.experts import DISPATCHES
from mindllm.cli.common import add_device_option, exit_code_of, proof_display
from mindllm.command import CommandParser, output_file, positive, positive_number, run_command
from mindllm.errors import CheckFailed, UserError
from mindllm.jobs.memory import add_memory_option
from mindllm.jobs.ray_cluster import add_executor_option
from mindllm.terminal.console import error_console, output, print_json
from mindllm.terminal.render import show

if TYPE_CHECKING:
    from mindllm.recipes.book import Book
    from mindllm.recipes.configure import Configured

EXAMPLE = """examples:
  %(prog)s llama2_70b --devices 64 --global-batch 512 --seq 4096 -o run.yaml
  %(prog)s models/Qwen2.5-7B --devices 8 --device atlas_800t_a2
  %(prog)s llama3_8b --at-most 64 --tokens-per-second 100000 --no-attention-recompute

The YAML contains the differences from the shipped run of the network, each key with its reason; the proof is written
next to it. mindllm models lists the shipped networks.
Exit codes: 0 ready, 3 refuted or no strategy fits, 1 not proved, 2 invalid input.
"""


def make_parser() -> CommandParser:
    """Return the parser of the command line."""
    parser = CommandParser(
        prog="mindllm configure",
        takes_keys=True,
        usage="%(prog)s NETWORK --devices N [options] [--section.key=value ...]",
        description="Finds the fastest parallel strategy of a network on a number of devices, plans stages and recomputation, "
        "proves the run, and writes its YAML.",
        epilog=EXAMPLE,
    )
    add = parser.add_argument
    network = "shipped name, Hugging Face directory, config.json, or YAML, also one that this command has written"
    add("network", metavar="NETWORK|YAML", help=network)
    add(
        "--devices",
        type=positive,
        metavar="N",
        help="number of devices: a multiple of 8, or 1, 2, 4 (default: of the YAML)",
    )
    fewest = "upper bound on devices; the smallest count that meets --tokens-per-second is chosen"
    add("--at-most", type=positive, metavar="N", help=fewest)
    add_device_option(parser)
    add("--global-batch", type=positive, metavar="B", help="sequences per step (default: that of the network, or 512)")
    add("--seq", type=positive, metavar="S", help="tokens per sequence (default: that of the network, at most 4096)")
    data = "indexed corpus of mindllm data (default: the question of the data stays open)"
    add("--data", default="", metavar="PREFIX", help=data)
    add("--memory-limit", metavar="SIZE", help="memory limit of a device, such as 58GB (default: nine tenths)")
    add("--max-tensor-parallel", type=positive, metavar="N", help="most tensor-parallel ranks (default: one node)")
    add("--max-stages", type=positive, metavar="N", help="most pipeline stages")
    add("--no-attention-recompute", action="store_true", help="never recompute attention")
    dispatch = f"expert dispatch: {', '.join(DISPATCHES)} (default: those that drop no tokens, or that of a YAML)"
    add("--dispatch", nargs="+", choices=DISPATCHES, default=(), metavar="D", help=dispatch)
    add("--tokens-per-second", type=positive_number, metavar="X", help="minimum speed of all devices together")
    add("-o", "--output", type=output_file, metavar="FILE", help="YAML file to write (default: NETWORK_Np.yaml)")
    spares = "also find layouts for up to N nodes fewer (1 or 2), and write a plan book"
    add("--spares", type=int, choices=(1, 2), metavar="N", help=spares)
    node = "devices of a node, for --spares (default: set by the links of the device)"
    add("--node-devices", type=positive, metavar="N", help=node)
    add("--quick", action="store_true", help="search and plan by formula only, without simulation and proof")
    add("--workers", type=positive, metavar="N", help="concurrent processes of a check (default: set by cores)")
    add_memory_option(parser)
    add_executor_option(parser)
    add("--json", action="store_true", help="print one JSON object")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Find, prove and write a run; return the exit code."""
    words = list(sys.argv[2:] if arguments is None else arguments)
    options, overrides = make_parser().parse_known_args(words)

    from mindllm import api
    from mindllm.recipes.book import Book
    from mindllm.strategies.constraints import Constraints

    devices = _device_count(options)
    constraints = Constraints(
        options.max_tensor_parallel,
        options.max_stages,
        not options.no_attention_recompute,
        options.tokens_per_second,
        tuple(options.dispatch),
    )
    with proof_display(options.json) as (on_answer, progress):
        result = api.configure(
            options.network,
            devices,
            fewest=bool(options.at_most),
            device=options.device,
            global_batch=options.global_batch,
            seq_length=options.seq,
            memory=options.memory_limit,
            constraints=constraints,
            data=options.data,
            overrides=overrides,
            quick=options.quick,
            spares=options.spares or 0,
            node_devices=options.node_devices,
            output=options.output or Path(),
            workers=options.workers,
            command=shlex.join(["mindllm", "configure", *words]),
            on_answer=on_answer,
            progress=progress,
        )
    if not isinstance(result, Book):
        _show(result, None, options.json)
        return _exit_code(result)
    _show(result.run, result, options.json)
    return max(_exit_code(layout.run) for layout in result.layouts)


def _device_count(options: argparse.Namespace) -> int:
    """Return the number of devices of the options, or of the YAML.

    Raises:
        UserError: options are missing or contradict each other.
    """
    if options.devices and options.at_most:
        raise UserError("--devices and --at-most exclude each other; remove one")
    if options.at_most and not options.tokens_per_second:
        raise UserError("--at-most requires --tokens-per-second; pass it too, or use --devices")
    if options.node_devices and not options.spares:
        raise UserError("--node-devices requires --spares")
    if count := options.devices or options.at_most:
        return count
    if options.network.endswith((".yaml", ".yml")):
        from mindllm.api import load_config

        return load_config(options.network).parallel_config.device_num
    raise UserError("--devices is missing; example: --devices 64")


def _exit_code(run: Configured | None) -> int:
    """Return the exit code of a layout: that of its proof, or that of a failed search."""
    if run is None:
        return CheckFailed.exit_code
    return exit_code_of(run.proof) if run.proof else 0


def _show(run: Configured, book: Book | None, as_json: bool) -> None:
    """Print the run and the files that were written."""
    from mindllm.recipes.configure import proof_directory
    from mindllm.recipes.recipe import book_path

    path = run.path
    assert path is not None
    if as_json:
        print_json(run.to_dict() | {"written": str(path)} | (book.files(path) if book else {}))
        return
    show(run, as_json=False)
    if book:
        output.print(book.table_of(path))
        for line in book.lines():
            output.print(line)
    proof = f"; proof: {proof_directory(path)}/report.html" if run.proof else ""
    output.print(f"wrote {path}{proof}")
    if book:
        layouts = sum(layout.run is not None for layout in book.layouts)
        launch = ["mindllm", "launch", str(path), "--book", str(book_path(path)), "--restart", "3"]
        output.print(f"wrote {book_path(path)}, a plan book of {layouts} layouts")
        output.print(f"to use them when nodes fail: {shlex.join(launch)}")
    if run.proof is None:
        error_console.print(f"estimated only; prove it: mindllm prove {shlex.quote(str(path))}")


if __name__ == "__main__":
    run_command(main)
