"""``mindllm configure``: from a network and devices to a proved run."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mindllm.architecture.experts import DISPATCHES
from mindllm.command import INTERRUPTED, CommandParser, output_file, positive, run_command
from mindllm.errors import CheckFailed, UserError
from mindllm.jobs.memory import add_memory_option
from mindllm.jobs.ray_cluster import add_executor_option
from mindllm.terminal.console import error_console, output, print_json
from mindllm.terminal.render import drawn, show
from mindllm.timing.shipped import DEFAULT, shipped_devices

if TYPE_CHECKING:
    from mindllm.config import RunConfig
    from mindllm.prove.proof import Proof
    from mindllm.recipes.book import Book
    from mindllm.recipes.configure import Configured, Request

EXAMPLE = """examples:
  %(prog)s llama2_70b --devices 64 --global-batch 512 --seq 4096 -o run.yaml
  %(prog)s models/Qwen2.5-7B --devices 8 --device atlas_800t_a2
  %(prog)s llama3_8b --at-most 64 --tokens-per-second 100000 --no-attention-recompute

The YAML holds what differs from the network's own run, each key with its reason; the proof lies beside it. Names of shipped
networks: mindllm models. Exit codes: 0 ready, 3 refuted or nothing fits, 1 something could not be proved, 2 wrong input.
"""


def make_parser() -> CommandParser:
    """Return the parser of the command line."""
    parser = CommandParser(
        prog="mindllm configure",
        takes_keys=True,
        usage="mindllm configure NAME|DIR|CONFIG.JSON|YAML --devices N [options] [--section.key=value ...]",
        description="Finds the fastest strategy of a network on a number of devices, plans its stages and recomputation, proves "
        "it, and writes the run: no YAML is needed.",
        epilog=EXAMPLE,
    )
    add = parser.add_argument
    add("network", nargs="?", metavar="NETWORK", help="shipped name, Hugging Face directory, config.json, or YAML")
    add("--config", type=Path, metavar="YAML", help="a run that this command has written: found and proved once more")
    add("--devices", type=positive, metavar="N", help="how many; a multiple of 8, or 1, 2, 4")
    add("--at-most", type=positive, metavar="N", help="no more devices; the fewest that reach --tokens-per-second")
    names = ", ".join(shipped_devices())
    add("--device", default=DEFAULT, metavar="NAME", help=f"a YAML, or one of {names} (default %(default)s)")
    add("--global-batch", type=positive, metavar="B", help="sequences of a step (default: the network's own, or 512)")
    add("--seq", type=positive, metavar="S", help="tokens of a sequence (default: the network's own, at most 4096)")
    add("--data", default="", metavar="PREFIX", help="indexed corpus (mindllm data); none: data stays open")
    add("--memory-limit", metavar="SIZE", help="of a device, as 58GB (default: nine tenths of it)")
    add("--max-tensor-parallel", type=positive, metavar="N", help="ranks at most (default: those of a node)")
    add("--max-stages", type=positive, metavar="N", help="pipeline stages at most")
    add("--no-attention-recompute", action="store_true", help="attention is never computed again")
    add("--dispatch", nargs="+", choices=DISPATCHES, default=(), metavar="D",
        help=f"how tokens reach experts: {', '.join(DISPATCHES)} (default: what drops no token, or a YAML's)")  # fmt: skip
    add("--tokens-per-second", type=_speed, metavar="X", help="of all devices, at least")
    add("-o", "--output", type=output_file, metavar="FILE", help="YAML file of the run (default NETWORK_Np.yaml)")
    add(
        "--spares",
        type=int,
        choices=(1, 2),
        metavar="N",
        help="layouts for up to N nodes fewer (1 or 2), and a book of them",
    )
    add(
        "--node-devices",
        type=positive,
        metavar="N",
        help="of a node, for --spares (default: as the device's links say)",
    )
    add("--quick", action="store_true", help="search and plan by formula; nothing is simulated or proved")
    add("--workers", type=positive, metavar="N", help="processes at once in a piece of a proof")
    add_memory_option(parser)
    add_executor_option(parser)
    add("--json", action="store_true", help="print one JSON object")
    return parser


def _speed(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number of tokens a second above 0")
    return value


def main(arguments: Sequence[str] | None = None) -> int:
    """Find, prove and write a run; return the exit code."""
    given = list(sys.argv[2:] if arguments is None else arguments)
    options, overrides = make_parser().parse_known_args(given)

    from mindllm.recipes.book import Book, devices_of_node, find_spares, spare_counts
    from mindllm.recipes.spare_files import forget_spares, spare_path

    request = _request(options, overrides)
    if options.node_devices and not options.spares:
        raise UserError("--node-devices: is said of spares; give --spares N too, or leave it out")
    node = devices_of_node(request.device, options.node_devices) if options.spares else 0
    if options.spares and not request.fewer:
        spare_counts(request.devices, node, options.spares)  # before the search
    command = shlex.join(["mindllm", "configure", *given])
    found = _search(request, command)
    place = options.output or Path(f"{request.network.name}_{found.device_count}p.yaml")
    counts = spare_counts(found.device_count, node, options.spares) if options.spares else ()
    found = _proved(request, command, found, place, options)
    if not counts:
        return _end(options, found, place, _code(found))

    def find(smaller: Request, number: int) -> Configured:
        return _proved(smaller, command, _search(smaller, command), spare_path(place, number), options)

    forget_spares(place)
    book = Book(found, node, tuple(find_spares(request, found, counts, find)))
    book.write_book(place)
    runs = [layout.found for layout in book.layouts]
    return _end(options, found, place, max(_code(run) if run else CheckFailed.exit_code for run in runs), book)


def _search(request: Request, command: str, dry_run: int | None = None) -> Configured:
    from mindllm.recipes.configure import find_run

    with drawn() as progress:
        return find_run(request, command, dry_run=dry_run, progress=progress)


def _proved(request: Request, command: str, found: Configured, place: Path, options: argparse.Namespace) -> Configured:
    """Return the run with its proof, unless by formula alone; write both."""
    from mindllm.prove.write import write_proof
    from mindllm.recipes.configure import prove_found

    if options.quick:
        _write(found, place)
        return found
    again = partial(_search, request, command, 1)
    found = prove_found(found, again, lambda config: _prove(config, str(place), request, options))
    _write(found, place)
    assert found.proof is not None
    write_proof(found.proof, place.with_name(f"{place.stem}_proof"))
    return found


def _write(found: Configured, place: Path) -> None:
    """Write the run, and say what of an earlier one is gone."""
    from mindllm.recipes.spare_files import say_forgotten

    if said := say_forgotten(place, found.write(place)):
        error_console.print(said)


def _code(found: Configured) -> int:
    """Return the exit code of a run: that of its verdict."""
    from mindllm.cli.proving import CODES

    if found.proof is None:
        return 0
    return CODES[found.proof.verdict] if found.proof.complete else INTERRUPTED


def _request(options: argparse.Namespace, overrides: list[str]) -> Request:
    from mindllm.recipes.configure import Request
    from mindllm.recipes.network import find_network
    from mindllm.strategies.constraints import Constraints
    from mindllm.timing.device import read_device

    if bool(options.network) == bool(options.config):
        raise UserError("mindllm configure: name a network, as in: mindllm configure llama2_70b --devices 64")
    if options.devices and options.at_most:
        raise UserError("--devices and --at-most are both given; keep one")
    if options.at_most and not options.tokens_per_second:
        raise UserError("--at-most: how fast is fast enough? give --tokens-per-second X too, or --devices N")
    network = find_network(str(options.config or options.network))
    devices = options.devices or options.at_most
    if devices is None and options.config and network.config:
        devices = network.config.parallel_config.device_num
    if devices is None:
        raise UserError("--devices: how many are there? as in --devices 64")
    constraints = Constraints(
        options.max_tensor_parallel, options.max_stages, not options.no_attention_recompute, options.tokens_per_second,
        tuple(options.dispatch),
    )  # fmt: skip
    return Request(
        network,
        read_device(options.device),
        devices,
        options.global_batch,
        options.seq,
        options.memory_limit,
        constraints,
        fewer=bool(options.at_most),
        data=options.data,
        overrides=overrides,
    )


def _prove(config: RunConfig, name: str, request: Request, options: argparse.Namespace) -> Proof:
    """Prove the run; without data of the person that question may stay open."""
    from mindllm.cli.proving import watched
    from mindllm.prove.pieces import Options
    from mindllm.prove.prove import prove_run
    from mindllm.prove.questions import DATA

    how = Options(options.device, workers=options.workers)
    allowed = () if request.data else (DATA,)
    with watched(options.json) as (answered, told):
        return prove_run(config, how, name, allowed=allowed, answered=answered, told=told)


def _end(options: argparse.Namespace, found: Configured, place: Path, code: int, book: Book | None = None) -> int:
    """Show what was found, and where it is."""
    from mindllm.recipes.spare_files import book_path

    if options.json:
        print_json(found.to_dict() | {"written": str(place)} | (book.files(place) if book else {}))
        return code
    show(found, as_json=False)
    if book:
        output.print(book.table_of(place))
        for line in book.lines():
            output.print(line)
    beside = "" if found.proof is None else f"; its proof: {place.with_name(f'{place.stem}_proof')}/report.html"
    output.print(f"wrote {place}{beside}")
    if book:
        written = book_path(place)
        launch = ["mindllm", "launch", str(place), "--book", str(written), "--restart", "3"]
        output.print(f"wrote {written}, a book of {sum(layout.found is not None for layout in book.layouts)} layouts")
        output.print(f"{shlex.join(launch)} takes them where nodes are lost")
    if found.proof is None:
        error_console.print(f"by formula alone; mindllm prove {shlex.quote(str(place))}")
    return code


if __name__ == "__main__":
    run_command(main)
