"""``mindllm preflight``: check this node before a run; ``scripts/preflight.sh`` takes the arguments of the launcher's script."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mindllm.command import LARGEST_PORT, CommandParser, duration, port, positive, run_command
from mindllm.errors import CheckFailed, UserError
from mindllm.launch.job import HOST
from mindllm.terminal.console import output, print_json

if TYPE_CHECKING:
    from mindllm.config import RunConfig
    from mindllm.preflight.finding import Finding

EXAMPLE = """examples:
  %(prog)s configs/llama2/pretrain_llama2_13b.yaml --workers 8
  %(prog)s run.yaml --workers 16 --local_workers 8 --master_addr 192.168.1.10 --node_rank 1

Exit codes: 0 nothing says no, 2 wrong input, 3 something says no.
"""


def make_parser() -> CommandParser:
    """Returns the parser of the command line."""
    parser = CommandParser(
        prog="mindllm preflight",
        takes_keys=True,
        description="Checks this node before a run: versions, devices, memory, the shared directory, ports, clocks.",
        epilog=EXAMPLE,
    )
    parser.add_argument(
        "--config", type=Path, help="YAML of the run, also as the first word: its device, output_dir and checkpoints"
    )
    parser.add_argument(
        "--directory", type=Path, help="shared directory (default: output_dir of --config, or ./output)"
    )
    parser.add_argument(
        "--workers", type=positive, help="processes of all nodes (default: as many as --config describes, or 1)"
    )
    parser.add_argument("--local_workers", type=positive, help="those of this node (default: all)")
    parser.add_argument("--master_addr", default=HOST, help="address of node 0 (default: %(default)s)")
    parser.add_argument(
        "--port", type=port, default=8118, help="port of node 0; the one after it, too (default: %(default)s)"
    )
    parser.add_argument("--node_rank", type=int, default=0, help="number of this node (default: %(default)s)")
    parser.add_argument(
        "--timeout", type=duration, default=60.0, help="seconds to wait for other nodes (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a line for each check; returns 0 when none says no."""
    options, overrides = make_parser().parse_known_args(arguments)

    from mindllm.config import load_config
    from mindllm.preflight.network import as_json

    if overrides and options.config is None:
        raise UserError(f"{overrides[0]}: changes a key of a configuration; give --config, too")
    config = load_config(options.config, overrides) if options.config else None
    options.workers = options.workers or (config.parallel_config.device_num if config else 1)
    local = options.local_workers or options.workers
    if options.workers % local or not 0 <= options.node_rank < options.workers // local:
        raise UserError(f"{options.workers} workers, {local} on each node, node {options.node_rank}: these do not fit")
    if options.port == LARGEST_PORT:
        raise UserError(f"--port {options.port}: the port after it is used, too, and there is none")
    findings: list[Finding] = []
    for finding in check(config, options, local):
        findings.append(finding)
        if not options.json:
            output.print(finding.line())
    if options.json:
        print_json(as_json(findings))
    refused = [finding.subject for finding in findings if finding.state == "no"]
    if refused:
        raise CheckFailed(f"not ready: {', '.join(dict.fromkeys(refused))}")
    return 0


def check(config: RunConfig | None, options: argparse.Namespace, local: int) -> Iterator[Finding]:
    """All findings of this node."""
    from mindllm.preflight.finding import bad, good
    from mindllm.preflight.network import answer_nodes, ask_master, check_ports
    from mindllm.preflight.node import check_devices, check_directory, check_host_memory
    from mindllm.preflight.versions import check_versions

    needs_devices = config is None or config.context.device_target == "Ascend"
    if config is not None and config.parallel_config.device_num != options.workers:
        seen = f"{config.parallel_config.device_num} devices in parallel_config, {options.workers} workers"
        yield bad("configuration", seen, "Start as many workers as the configuration describes")
    yield from check_versions(needs_devices)
    if needs_devices:
        yield from check_devices(local)
    else:
        yield good("devices", "none needed: context.device_target is CPU")
    yield check_host_memory(local)
    directory = options.directory or Path(config.output_dir if config else "output")
    yield from check_directory(directory, room(config) if config else 0)
    nodes = options.workers // local
    if options.node_rank == 0:
        ports = list(check_ports(options.master_addr, options.port))
        yield from ports
        if nodes > 1 and all(finding.state == "good" for finding in ports):
            yield from answer_nodes(options.master_addr, options.port, nodes, directory, options.timeout)
    else:
        yield from ask_master(options.master_addr, options.port, options.node_rank, directory, options.timeout)


def room(config: RunConfig) -> int:
    """Bytes of all checkpoints that are kept, and the one that is being written."""
    from mindllm.train.checkpoint.store import checkpoint_bytes, max_checkpoints

    return checkpoint_bytes(config) * (max_checkpoints(config) + 1)


if __name__ == "__main__":
    run_command(main)
