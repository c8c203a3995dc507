"""``mindllm accept``: what mindllm claims, beside a few small runs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mindllm.cli.nodes import add_node_options, on_this_node, scheduled
from mindllm.cli.ranks import say
from mindllm.command import INTERRUPTED, CommandParser, output_directory, positive, run_command
from mindllm.errors import CheckFailed, RunFailed, UserError
from mindllm.launch.clusters.schedulers import forget_task
from mindllm.launch.start import Launch, refuse_impossible
from mindllm.terminal.console import error_console, output
from mindllm.terminal.render import drawn, show
from mindllm.terminal.text import styled
from mindllm.timing.shipped import DEFAULT, shipped_devices

if TYPE_CHECKING:
    from mindllm.accept.accept import Wanted
    from mindllm.accept.acceptance import Acceptance
    from mindllm.accept.judge import Line
    from mindllm.accept.nodes import Nodes

TIMEOUT = 600  # seconds in which nodes find each other
CLAIMS = "single, dp, tp, pp, ep, optimizer, recompute, resume"
EXAMPLES = """examples:
  %(prog)s --devices 8 --output accept
  %(prog)s --claims dp,tp --keep
  srun --nodes=2 --ntasks-per-node=1 %(prog)s --output /shared/accept
  %(prog)s --devices 16 --local_workers 8 --master_addr 192.168.1.10 --node_rank 1 --output /shared/accept

Several nodes: start the same command on each. Node 0 leaves page and archive; the others take part and end with its exit code.
Exit codes: 0 good, 1 a run failed or no claim was run, 2 wrong input, 3 a claim is refuted.
"""


def make_parser() -> CommandParser:
    """Return the parser of the command line."""
    parser = CommandParser(
        prog="mindllm accept",
        description="Holds what mindllm claims against a few small runs: on Ascend devices where there are some, otherwise as "
        "processes of this CPU. Leaves one page, and one archive without names, paths or addresses. Installs nothing.",
        epilog=EXAMPLES,
    )
    parser.add_argument(
        "--devices",
        type=positive,
        metavar="N",
        help="devices of all nodes, or ranks on CPUs (default: all that are here, or 2; of tasks of Slurm and of pods: of all)",
    )
    add_node_options(parser, TIMEOUT, "the two after it are used")
    parser.add_argument(
        "--output",
        type=output_directory,
        default="accept",
        metavar="DIR",
        help="directory for page and archive; several nodes share it (default: %(default)s)",
    )
    parser.add_argument(
        "--device",
        default=DEFAULT,
        metavar="FILE",
        help=f"what steps and links are predicted for: a YAML, or one of {', '.join(shipped_devices())} (default: %(default)s)",
    )
    parser.add_argument("--claims", default="", metavar="LIST", help=f"some of {CLAIMS} (default: all)")
    parser.add_argument("--keep", action="store_true", help="keep the runs; those that failed are kept anyway")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the claims, write page and archive, and return the exit code; on nodes other than the first take part."""
    options = make_parser().parse_args(arguments)

    from mindllm.accept.follow import follow
    from mindllm.accept.nodes import Nodes
    from mindllm.preflight.node import visible_devices

    here = visible_devices()
    place = _place(options, here)
    if place.node_rank:
        code = follow(place, here, say)
        say(f"node {place.node_rank}: node 0 has ended with exit code {code}; page and archive are in {options.output}")
        return code
    with Nodes(place, here, say) as nodes:
        nodes.gather()
        nodes.code = _accept(_wanted(options, nodes), nodes, options.json)
    return nodes.code


def _accept(wanted: Wanted, nodes: Nodes, as_json: bool) -> int:
    """Run the claims on all nodes, write page and archive, and return the exit code."""
    from mindllm.accept.accept import accept
    from mindllm.accept.acceptance import ON_A_CPU
    from mindllm.accept.archive import write_acceptance

    if not wanted.here:
        error_console.print(ON_A_CPU)
    with drawn() as progress:
        found = accept(
            wanted,
            lambda line: None if as_json else _print(line),
            _explain,
            lambda known: _write(known, wanted.output),
            progress,
            nodes,
        )
    page, archive = write_acceptance(found, wanted.output)
    show(found, as_json)
    if not as_json:
        output.print(f"{page}: for people; {archive}: without names, paths or addresses, to hand on")
    return INTERRUPTED if found.interrupted else code_of(found)


def _place(options: argparse.Namespace, here: int) -> Launch:
    """Return which node this is of how many, and how they find each other.

    Raises:
        UserError: numbers do not fit each other, or a scheduler has not started one task for each node.
    """
    from mindllm.accept.accept import ON_CPU_DEVICES
    from mindllm.accept.measured import alone

    task = scheduled(options)
    forget_task()
    tasks = task.tasks if task else 1
    if task and tasks > 1 and task.shares_machines:
        raise UserError(
            f"{task.scheduler} has started several tasks on a machine; start one on each: --ntasks-per-node=1"
        )
    if not options.devices and (options.node_rank is not None or options.master_addr or options.local_workers):
        raise UserError("--devices: how many do all nodes have together? give --devices N, the same on each")
    devices = options.devices or here * tasks or max(ON_CPU_DEVICES, tasks)
    whole = replace(alone(Path(options.output).absolute(), here > 0), workers=devices)
    place = on_this_node(whole, options, task)
    refuse_impossible(place)
    return place


def _wanted(options: argparse.Namespace, nodes: Nodes) -> Wanted:
    from mindllm.accept.accept import Wanted
    from mindllm.accept.claims import chosen
    from mindllm.timing.device import read_device

    names = [name.strip() for name in options.claims.split(",") if name.strip()]
    devices, device = nodes.place.workers, read_device(options.device)
    return Wanted(chosen(names), devices, device, Path(options.output), options.keep, nodes.devices_here, nodes.count)


def code_of(found: Acceptance) -> int:
    """Return the exit code: 3 where a claim is refuted, 1 where a run failed or none says anything."""
    from mindllm.accept.judge import Verdict

    verdicts = {found.verdict(claim) for claim in found.claims}
    if Verdict.REFUTED in verdicts:
        return CheckFailed.exit_code
    silent = verdicts <= {Verdict.NOT_RUN}
    return RunFailed.exit_code if Verdict.FAILED in verdicts or silent else 0


def _write(found: Acceptance, directory: Path) -> None:
    from mindllm.accept.archive import write_acceptance

    write_acceptance(found, directory)


def _print(line: Line) -> None:
    from mindllm.accept.acceptance import COLOURS, cells

    name, figure, predicted, measured = cells(line)
    verdict = (f"{line.verdict.value:<11}", COLOURS[line.verdict])
    output.print(styled(verdict, f"{name} {figure}: predicted {predicted}, measured {measured}; {line.why}"))


def _explain(claim: str, text: str) -> None:
    """Print all that is said of a failure, which is not for the archive."""
    error_console.print(f"{claim}: {text}")


if __name__ == "__main__":
    run_command(main)
