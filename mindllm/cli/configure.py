"""What ``mindllm configure`` does."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from mindllm.cli.parsers.configure import make_parser
from mindllm.cli.proving import CODES, watched
from mindllm.command import INTERRUPTED, run_command
from mindllm.config import RunConfig
from mindllm.errors import CheckFailed, UserError
from mindllm.prove.pieces import Options
from mindllm.prove.proof import Proof
from mindllm.prove.prove import prove_run
from mindllm.prove.questions import DATA
from mindllm.prove.write import write_proof
from mindllm.recipes.book import Book, Layout, devices_of_node, find_spares, spare_counts
from mindllm.recipes.configure import Configured, Request, find_run, prove_found
from mindllm.recipes.network import find_network
from mindllm.strategies.constraints import Constraints
from mindllm.terminal.console import error_console, output, print_json
from mindllm.terminal.render import drawn, show
from mindllm.timing.device import read_device


def main(arguments: Sequence[str] | None = None) -> int:
    """Find, prove and write a run; return the exit code."""
    given = list(sys.argv[2:] if arguments is None else arguments)
    options, overrides = make_parser().parse_known_args(given)
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

    def find(smaller: Request, path: Path) -> Configured:
        return _proved(smaller, command, _search(smaller, command), path, options)

    spares = find_spares(request, found, place, counts, find)
    book = Book(node, found.config.global_batch_size, (Layout(found.device_count, place, found), *spares))
    book.write(place.with_name(f"{place.stem}.book.yaml"))
    runs = [layout.found for layout in book.layouts]
    return _end(options, found, place, max(_code(run) if run else CheckFailed.exit_code for run in runs), book)


def _search(request: Request, command: str, dry_run: int | None = None) -> Configured:
    with drawn() as progress:
        return find_run(request, command, dry_run=dry_run, progress=progress)


def _proved(request: Request, command: str, found: Configured, place: Path, options: argparse.Namespace) -> Configured:
    """Return the run with its proof, unless by formula alone; write both."""
    if options.quick:
        found.write(place)
        return found
    again = partial(_search, request, command, 1)
    found = prove_found(found, again, lambda config: _prove(config, str(place), request, options))
    found.write(place)
    assert found.proof is not None
    write_proof(found.proof, place.with_name(f"{place.stem}_proof"))
    return found


def _code(found: Configured) -> int:
    """Return the exit code of a run: that of its verdict."""
    if found.proof is None:
        return 0
    return CODES[found.proof.verdict] if found.proof.complete else INTERRUPTED


def _request(options: argparse.Namespace, overrides: list[str]) -> Request:
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
        options.max_tensor_parallel, options.max_stages, not options.no_attention_recompute, options.tokens_per_second
    )
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
    how = Options(options.device, workers=options.workers)
    allowed = () if request.data else (DATA,)
    with watched(options.json) as (answered, told):
        return prove_run(config, how, name, allowed=allowed, answered=answered, told=told)


def _end(options: argparse.Namespace, found: Configured, place: Path, code: int, book: Book | None = None) -> int:
    """Show what was found, and where it is."""
    written = place.with_name(f"{place.stem}.book.yaml")
    if options.json:
        spares = {"book": str(written), "layouts": [layout.tree() for layout in book.layouts]} if book else {}
        print_json(found.to_dict() | {"written": str(place)} | spares)
        return code
    show(found, as_json=False)
    if book:
        output.print(book.table())
        for line in book.lines():
            output.print(line)
    beside = "" if found.proof is None else f"; its proof: {place.with_name(f'{place.stem}_proof')}/report.html"
    output.print(f"wrote {place}{beside}")
    if book:
        output.print(f"wrote {written}, a book of {sum(layout.found is not None for layout in book.layouts)} layouts")
        output.print(f"mindllm launch {place} --book {written} --restart 3 takes them where nodes are lost")
    if found.proof is None:
        error_console.print(f"by formula alone; mindllm prove {place}")
    return code


if __name__ == "__main__":
    run_command(main)
