"""``mindllm preflight``: check this node before a run; ``scripts/preflight.sh`` takes the arguments of the launcher's script."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mindllm.command import LARGEST_PORT, CommandParser, port, positive, positive_number, run_command
from mindllm.errors import CheckFailed, UserError
from mindllm.launch.job import HOST
from mindllm.terminal.console import output, print_json

if TYPE_CHECKING:
    from mindllm.config import RunConfig
    from mindllm.preflight.finding import Finding

EXAMPLE = """examples:
  %(prog)s configs/llama2/pretrain_llama2_13b.yaml --workers 8
  %(prog)s run.yaml --workers 16 --local-workers 8 --master-addr 192.168.1.10 --node-rank 1

Exit codes: 0 all checks pass, 2 invalid input, 3 a check failed.
"""


def make_parser() -> CommandParser:
    """Return the parser of the command line."""
    parser = CommandParser(
        prog="mindllm preflight",
        takes_keys=True,
        description="Checks this node before a run: versions, devices, memory, shared directory, ports, clocks.",
        epilog=EXAMPLE,
    )
    add = parser.add_argument
    parser.add_run("YAML of the run, for its device, output_dir and checkpoints", nargs="?", type=Path)
    add("--directory", type=Path, metavar="DIR", help="shared directory (default: output_dir of the run, or ./output)")
    add("--workers", type=positive, metavar="N", help="processes on all nodes (default: devices of the run, or 1)")
    add("--local-workers", type=positive, metavar="N", help="processes of this node (default: all)")
    add("--master-addr", default=HOST, metavar="HOST", help="address of node 0 (default: %(default)s)")
    add("--port", type=port, default=8118, help="port of node 0; the next port is also used (default: %(default)s)")
    add("--node-rank", type=int, default=0, metavar="N", help="number of this node (default: %(default)s)")
    timeout = "time limit for other nodes (default: %(default)s)"
    add("--timeout", type=positive_number, default=60.0, metavar="SECONDS", help=timeout)
    add("--json", action="store_true", help="print the findings as JSON")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each check; return 0 if all pass."""
    options, overrides = make_parser().parse_known_args(arguments)

    from mindllm.config import load_config
    from mindllm.preflight.network import as_json

    if overrides and options.run is None:
        raise UserError(f"{overrides[0]}: keys require a run; example: mindllm preflight run.yaml")
    config = load_config(options.run, overrides) if options.run else None
    options.workers = options.workers or (config.parallel_config.device_num if config else 1)
    local = options.local_workers or options.workers
    if options.workers % local or not 0 <= options.node_rank < options.workers // local:
        numbers = f"--workers {options.workers}, --local-workers {local}, --node-rank {options.node_rank}"
        raise UserError(f"{numbers}: these do not fit together")
    if options.port == LARGEST_PORT:
        raise UserError(f"--port {options.port}: the next port is also used; choose a smaller one")
    findings: list[Finding] = []
    for finding in check(config, options, local):
        findings.append(finding)
        if not options.json:
            output.print(finding.line())
    if options.json:
        print_json(as_json(findings))
    failed = [finding.subject for finding in findings if finding.state == "no"]
    if failed:
        raise CheckFailed(f"not ready: {', '.join(dict.fromkeys(failed))}")
    return 0


def check(config: RunConfig | None, options: argparse.Namespace, local: int) -> Iterator[Finding]:
    """Yield the findings on this node."""
    from mindllm.preflight.finding import bad, good
    from mindllm.preflight.network import answer_nodes, ask_master, check_ports
    from mindllm.preflight.node import check_devices, check_directory, check_host_memory
    from mindllm.preflight.versions import check_versions

    needs_devices = config is None or config.context.device_target == "Ascend"
    if config is not None and config.parallel_config.device_num != options.workers:
        counts = f"{config.parallel_config.device_num} devices in parallel_config, {options.workers} workers"
        yield bad("configuration", counts, "Start as many workers as the configuration has devices")
    yield from check_versions(needs_devices)
    if needs_devices:
        yield from check_devices(local)
    else:
        yield good("devices", "not needed: context.device_target is CPU")
    yield check_host_memory(local)
    directory = options.directory or Path(config.output_dir if config else "output")
    yield from check_directory(directory, disk_space(config) if config else 0)
    nodes = options.workers // local
    if options.node_rank == 0:
        ports = list(check_ports(options.master_addr, options.port))
        yield from ports
        if nodes > 1 and all(finding.state == "good" for finding in ports):
            yield from answer_nodes(options.master_addr, options.port, nodes, directory, options.timeout)
    else:
        yield from ask_master(options.master_addr, options.port, options.node_rank, directory, options.timeout)


def disk_space(config: RunConfig) -> int:
    """Return the bytes of all retained checkpoints and of the one being written."""
    from mindllm.train.checkpoint.store import checkpoint_bytes, max_checkpoints

    return checkpoint_bytes(config) * (max_checkpoints(config) + 1)


if __name__ == "__main__":
    run_command(main)
