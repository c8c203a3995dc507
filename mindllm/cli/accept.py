"""``mindllm accept``: test mindllm on this cluster with small runs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from mindllm.cli.common import add_device_option
from mindllm.cli.nodes import add_node_options, log_line, on_this_node, scheduled
from mindllm.command import INTERRUPTED, CommandParser, output_directory, positive, run_command
from mindllm.errors import CheckFailed, RunFailed, UserError
from mindllm.launch.clusters.schedulers import forget_task
from mindllm.launch.start import Launch, refuse_impossible
from mindllm.terminal.console import error_console, output
from mindllm.terminal.render import drawn, show
from mindllm.terminal.text import styled

if TYPE_CHECKING:
    from mindllm.accept.accept import Wanted
    from mindllm.accept.acceptance import Acceptance
    from mindllm.accept.judge import Line
    from mindllm.accept.nodes import Nodes

TIMEOUT = 600  # seconds in which nodes connect
CLAIMS = "single, dp, tp, pp, ep, optimizer, recompute, resume"
EXAMPLES = """examples:
  %(prog)s --devices 8 --output accept
  %(prog)s --claims dp,tp --keep
  srun --nodes=2 --ntasks-per-node=1 %(prog)s --output /shared/accept
  %(prog)s --devices 16 --local-workers 8 --master-addr 192.168.1.10 --node-rank 1 --output /shared/accept

On several nodes, start the same command on each. Node 0 writes page and archive; the others end with its exit code.
Exit codes: 0 success, 1 a run failed or no claim was tested, 2 invalid input, 3 a claim is refuted.
"""


def make_parser() -> CommandParser:
    """Return the parser of the command line."""
    parser = CommandParser(
        prog="mindllm accept",
        description="Tests the claims of mindllm with small runs, on Ascend devices or else as processes of this CPU. Writes a "
        "page, and an archive without names, paths and addresses. Installs nothing.",
        epilog=EXAMPLES,
    )
    add = parser.add_argument
    devices = (
        "devices of all nodes, or CPU ranks (default: all devices of this machine, or of the Slurm job or pods; else 2)"
    )
    add("--devices", type=positive, metavar="N", help=devices)
    add_node_options(parser, TIMEOUT, "the next two ports")
    directory = "directory for page and archive, shared by all nodes (default: %(default)s)"
    add("--output", type=output_directory, default="accept", metavar="DIR", help=directory)
    add_device_option(parser, "device description for predicted steps and links")
    add("--claims", default="", metavar="LIST", help=f"claims to test: {CLAIMS} (default: all)")
    add("--keep", action="store_true", help="keep the files of all runs; those of failed runs are always kept")
    add("--json", action="store_true", help="print one JSON object instead of the table")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Test the claims, write page and archive, and return the exit code; on other nodes than the first, follow it."""
    options = make_parser().parse_args(arguments)

    from mindllm.accept.follow import follow
    from mindllm.accept.nodes import Nodes
    from mindllm.preflight.node import visible_devices

    local_devices = visible_devices()
    place = _place(options, local_devices)
    if place.node_rank:
        code = follow(place, local_devices, log_line)
        log_line(f"node {place.node_rank}: node 0 ended with exit code {code}; page and archive: {options.output}")
        return code
    with Nodes(place, local_devices, log_line) as nodes:
        nodes.gather()
        nodes.code = _accept(_request(options, nodes), nodes, options.json)
    return nodes.code


def _accept(request: Wanted, nodes: Nodes, as_json: bool) -> int:
    """Test the claims on all nodes, write page and archive, and return the exit code."""
    from mindllm.accept.accept import accept
    from mindllm.accept.acceptance import ON_A_CPU
    from mindllm.accept.archive import write_acceptance

    if not request.here:
        error_console.print(ON_A_CPU)

    def write(result: Acceptance) -> None:
        write_acceptance(result, request.output)

    def explain(claim: str, text: str) -> None:  # details of a failure, which the archive omits
        error_console.print(f"{claim}: {text}")

    with drawn() as progress:
        on_line = (lambda line: None) if as_json else _print_line
        result = accept(request, on_line, explain, write, progress, nodes)
    page, archive = write_acceptance(result, request.output)
    show(result, as_json)
    if not as_json:
        output.print(f"report: {page}; to share, without names, paths and addresses: {archive}")
    return INTERRUPTED if result.interrupted else exit_code_of(result)


def _place(options: argparse.Namespace, local_devices: int) -> Launch:
    """Return the node of this process and how the nodes connect.

    Raises:
        UserError: numbers are inconsistent, or the scheduler did not start one task per node.
    """
    from mindllm.accept.accept import ON_CPU_DEVICES
    from mindllm.accept.measured import alone

    task = scheduled(options)
    forget_task()
    tasks = task.tasks if task else 1
    if task and tasks > 1 and task.shares_machines:
        raise UserError(f"{task.scheduler} started several tasks per machine; start one on each: --ntasks-per-node=1")
    if not options.devices and (options.node_rank is not None or options.master_addr or options.local_workers):
        raise UserError("--devices is missing; pass the number of devices of all nodes, the same on each node")
    devices = options.devices or local_devices * tasks or max(ON_CPU_DEVICES, tasks)
    job = replace(alone(options.output.absolute(), local_devices > 0), workers=devices)
    place = on_this_node(job, options, task)
    refuse_impossible(place)
    return place


def _request(options: argparse.Namespace, nodes: Nodes) -> Wanted:
    from mindllm.accept.accept import Wanted
    from mindllm.accept.claims import chosen
    from mindllm.timing.device import read_device

    names = [name.strip() for name in options.claims.split(",") if name.strip()]
    devices, device = nodes.place.workers, read_device(options.device)
    return Wanted(chosen(names), devices, device, options.output, options.keep, nodes.devices_here, nodes.count)


def exit_code_of(result: Acceptance) -> int:
    """Return the exit code: 3 if a claim is refuted, 1 if a run failed or no claim was tested."""
    from mindllm.accept.judge import Verdict

    verdicts = {result.verdict(claim) for claim in result.claims}
    if Verdict.REFUTED in verdicts:
        return CheckFailed.exit_code
    untested = verdicts <= {Verdict.NOT_RUN}
    return RunFailed.exit_code if Verdict.FAILED in verdicts or untested else 0


def _print_line(line: Line) -> None:
    from mindllm.accept.acceptance import COLOURS, cells

    name, figure, predicted, measured = cells(line)
    verdict = (f"{line.verdict.value:<11}", COLOURS[line.verdict])
    output.print(styled(verdict, f"{name} {figure}: predicted {predicted}, measured {measured}; {line.why}"))


if __name__ == "__main__":
    run_command(main)
