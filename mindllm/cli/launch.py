"""``mindllm launch``, and ``python -m mindllm.launch``, which ``scripts/msrun_launcher.sh`` calls: a run as several processes."""

from __future__ import annotations

import re
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindllm.cli.nodes import add_node_options, on_this_node, scheduled
from mindllm.cli.ranks import Shown, has_ascend_devices, say
from mindllm.command import CommandParser, output_directory, run_command
from mindllm.errors import UserError
from mindllm.launch.clusters.job_command import launch_words, name_of, nodes_of
from mindllm.launch.clusters.kubernetes_job import KINDS, KubernetesJob, claim_of
from mindllm.launch.clusters.slurm_script import SlurmScript
from mindllm.launch.layouts import LayoutBook, read_book
from mindllm.launch.script import MODES, command_of, config_word
from mindllm.launch.start import PATIENCE_SECONDS, Launch, launch, refuse_impossible

if TYPE_CHECKING:
    from mindllm.config import RunConfig

DESCRIPTION = "Runs a training script as several processes of this machine that train one model together."
EXAMPLES = """example:
  %(prog)s --workers 2 "run_llm.py --config configs/llama2/pretrain_llama2_tiny.yaml \\
      --use_parallel true --parallel_config.data_parallel=2 --batch_size 8"

Every rank writes {log_dir}/worker_{rank}.log; what rank 0 writes is printed, too. When a rank fails, the others are ended and
the end of its log is printed. SIGTERM and Ctrl-C stop all ranks after the same step. The exit code is that of the command.
"""
TIMEOUT = 7200  # seconds in which nodes find each other
TIME, NOTICE = "24:00:00", 300  # of a job for Slurm: its limit, and seconds before it for a checkpoint
TAKEN_BY = {
    "time": ("slurm",),
    "tasks": ("slurm",),
    "sbatch": ("slurm",),
    "image": ("kubernetes",),
    "claim": ("kubernetes",),
    "notice": ("slurm", "kubernetes"),
    "python": ("slurm", "kubernetes"),
    "setup": ("slurm", "kubernetes"),
}
PLACEHOLDER = re.compile(r"(^|/)path[_/-]to([_/-]|$)|(^|[/_-])your[_-]", re.IGNORECASE)
MAX_WARNINGS = 5  # about placeholders


def make_parser() -> CommandParser:
    """Return the parser of the command line."""
    parser = module_parser("mindllm launch", "train")
    parser.set_defaults(msrun=has_ascend_devices())
    return parser


def module_parser(prog: str = "python -m mindllm.launch", script: str = "run_llm.py") -> CommandParser:
    """Return the parser of the command line; ``script`` is what its example starts."""
    parser = CommandParser(prog=prog, description=DESCRIPTION, epilog=EXAMPLES.replace("run_llm.py", script))
    parser.add_argument("command", help="the script, or a verb such as train, with its arguments, in quotes")
    parser.add_argument(
        "--workers", type=int, metavar="N", help="number of processes, of all nodes (default: the devices of the run)"
    )
    add_node_options(parser, timeout=TIMEOUT)
    parser.add_argument("--log_dir", type=output_directory, default="output/msrun_log", help="default: %(default)s")
    parser.add_argument(
        "--shared_dir",
        type=output_directory,
        metavar="DIR",
        help="directory of all nodes, for a file by which they know each other (default: the run's output_dir; of another "
        "program than run_llm.py the log directory)",
    )
    parser.add_argument(
        "--restart",
        type=int,
        default=0,
        metavar="N",
        help="a job that fails is started again, N times at most, from its last good checkpoint (default: %(default)s)",
    )
    parser.add_argument(
        "--book",
        type=Path,
        metavar="FILE",
        help="the plan book of the run, which mindllm configure --spares writes: a start or restart that finds fewer nodes "
        "takes its layout for those, from the same checkpoint",
    )
    parser.add_argument(
        "--patience",
        type=float,
        metavar="SECONDS",
        help="for which a restart waits for lost nodes before it takes a smaller layout of --book "
        f"(default: {PATIENCE_SECONDS:g})",
    )
    parser.add_argument(
        "--msrun", action="store_true", help="MindSpore's msrun starts the ranks, as it does on Ascend devices"
    )
    _add_writing(parser)
    parser.add_argument("--check", action="store_true", help="only check what is given, and start nothing")
    return parser


def _add_writing(parser: CommandParser) -> None:
    """Add what is said of a job that is written for a cluster, and started by its scheduler."""
    group = parser.add_argument_group("a job of a cluster, written to standard output and not started")
    group.add_argument(
        "--slurm", action="store_true", help="write the file for sbatch; --local_workers are the devices of a node (8)"
    )
    group.add_argument(
        "--kubernetes",
        choices=KINDS,
        help="write the manifest of a Job of Volcano, or of an AscendJob of MindCluster's Ascend operator",
    )
    group.add_argument("--image", metavar="IMAGE", help="of the pods, with CANN, MindSpore and mindllm")
    group.add_argument(
        "--claim",
        action="append",
        metavar="CLAIM:/DIRECTORY",
        help="a PersistentVolumeClaim for data, configuration and output_dir, and where it is mounted; may be repeated, the "
        "first is the working directory",
    )
    group.add_argument("--time", metavar="LIMIT", help="time limit, as sbatch has it (default: 24:00:00)")
    group.add_argument(
        "--notice",
        type=int,
        metavar="SECONDS",
        help="seconds before the time is over at which a checkpoint is saved and the job queued again; of pods those that they "
        "have to end (default: 300)",
    )
    group.add_argument(
        "--tasks",
        choices=("node", "device"),
        help="one task for each node, which starts its ranks (default), or one for each device",
    )
    group.add_argument(
        "--sbatch", action="append", metavar="OPTION", help="a further option of sbatch; may be repeated"
    )
    group.add_argument(
        "--python",
        metavar="PATH",
        help="interpreter on the nodes (default: python, that of the environment that is active there; --setup can activate one)",
    )
    group.add_argument(
        "--setup", action="append", metavar="LINE", help="a line of shell before the run; may be repeated"
    )


def main(arguments: Sequence[str] | None = None, parser: CommandParser | None = None) -> int:
    """Start several processes as one job and wait for it; return the exit code, which is that of the command."""
    options, rest = (parser or make_parser()).parse_known_args(arguments)
    if rest:
        # Behind an unknown option stands its value, which was taken for the command.
        is_command = " " in options.command or options.command in MODES or Path(options.command).suffix
        quoted = f'"{options.command if is_command else "train --config FILE"} {rest[0]} ..."'
        raise UserError(
            f"{rest[0]}: unknown option of launch; put the script and all its options in one pair of quotes: {quoted}"
        )
    _refuse_idle_options(options)
    if options.slurm or options.kubernetes:
        text = write_slurm(options) if options.slurm else write_manifest(options)
        mounts = [directory for _, directory in map(claim_of, options.claim or ())]
        for warning in job_warnings(command_of(options.command), mounts):
            say(f"warning: {warning}")
        sys.stdout.write(text)
        return 0
    wanted = _wanted(options)
    refuse_impossible(wanted)
    if wanted.book is not None:
        refuse_other_layouts(wanted.book, wanted.command)
    if options.check:
        return 0
    if wanted.has_other_nodes and not options.shared_dir:
        wanted = replace(wanted, shared_dir=shared_directory(wanted.command, wanted.log_dir))
    return launch(wanted, say, Shown())


def _wanted(options: Namespace) -> Launch:
    """What is started here: as the options say, or, where they say nothing of nodes, the scheduler that started this process."""
    command = tuple(command_of(options.command))
    return on_this_node(_launch(options, command, _workers(options, command)), options, scheduled(options))


def _launch(options: Namespace, command: tuple[str, ...], workers: int) -> Launch:
    return Launch(
        command,
        workers,
        workers,
        options.log_dir,
        options.shared_dir or options.log_dir,
        port=options.port,
        timeout=options.timeout,
        restart=options.restart,
        msrun=options.msrun,
        book=read_book(options.book) if options.book else None,
        patience=PATIENCE_SECONDS if options.patience is None else options.patience,
    )


def _refuse_idle_options(options: Namespace) -> None:
    """Raise UserError for what is said of a book or of a written job where there is none."""
    if options.patience is not None and not options.book:
        raise UserError(
            "--patience: is said of nodes that a book has layouts without; give --book FILE too, or leave it out"
        )
    if options.slurm and options.kubernetes:
        raise UserError("--slurm and --kubernetes: one job is written at a time; keep one")
    for name, takes in TAKEN_BY.items():
        if getattr(options, name) is not None and not any(getattr(options, kind) for kind in takes):
            kinds = " or ".join(f"--{kind}" for kind in takes)
            raise UserError(
                f"--{name}: is said of a job that is written for a cluster; give {kinds} too, or leave it out"
            )


def write_slurm(options: Namespace) -> str:
    """Return the file for ``sbatch``."""
    nodes, local, words, name = _written(options, options.restart)
    notice, tasks = _notice(options), local if options.tasks == "device" else 1
    time, setup, further = options.time or TIME, options.setup or (), options.sbatch or ()
    return SlurmScript(name, words, nodes, tasks, time, notice, setup, further).text()


def write_manifest(options: Namespace) -> str:
    """Return the manifest for ``kubectl apply``: failed pods are started again by what runs there, not by our launcher."""
    if not options.image:
        raise UserError("--kubernetes: which image do the pods have? give --image IMAGE")
    nodes, local, words, name = _written(options, 0)
    claims = [claim_of(claim) for claim in options.claim or ()]
    job = KubernetesJob(
        name, words, nodes, local, options.image, claims, options.restart, _notice(options), options.setup or ()
    )
    return job.text(options.kubernetes)


def _written(options: Namespace, restart: int) -> tuple[int, int, list[str], str]:
    """Return nodes, ranks of each, what is run there and the name of a job that is written."""
    command = tuple(command_of(options.command))
    nodes, local = nodes_of(_workers(options, command), options.local_workers)
    defaults = make_parser().parse_args([options.command])
    wanted = replace(_launch(options, command, nodes * local), restart=restart)
    words = launch_words(wanted, options.command, _launch(defaults, command, 1), options.python or "python")
    return nodes, local, words, name_of(command)


def job_warnings(command: Sequence[str], mounts: Sequence[str] = ()) -> list[str]:
    """Return what will stop a run of ours on the nodes of a cluster: paths of this machine, placeholders, a missing proof.

    ``mounts`` are the directories that pods share.
    """
    config, named = _config(command), config_word(command)
    if config is None or config.source is None or named is None:
        return []
    from mindllm.config.reading.load import tree_of
    from mindllm.prove.found import find_proof, line_about
    from mindllm.run.proof import is_ready

    files = [("--config", named[2]), *_bases(config.source)]
    warnings = [
        f"{where} {path} is an absolute path of this machine; write a relative path, or have the file at this path on every node"
        for where, path in files
        if Path(path).is_absolute() and not any(Path(path).is_relative_to(mount) for mount in mounts)
    ]
    placeholders = [f"{key}: {value}" for key, value in _texts(tree_of(config)) if PLACEHOLDER.search(value)]
    warnings += [f"{item} is a placeholder; write the path on the nodes" for item in placeholders[:MAX_WARNINGS]]
    if len(placeholders) > MAX_WARNINGS:
        warnings.append(f"{len(placeholders) - MAX_WARNINGS} more placeholders")
    proof = find_proof(config)
    if config.parallel_config.device_num > 1 and not is_ready(proof):
        warnings.append(f"{config.source}: {line_about(config, proof)}")
    return warnings


def _bases(source: Path) -> Iterator[tuple[str, str]]:
    """Yield each base of a YAML, as it is written, and where it is written."""
    from mindllm.config.reading.load import base_files, read_file

    for file in (source, *base_files(source)):
        if isinstance(base := read_file(file).data.get("base"), str):
            yield f"{file}: base:", base


def _texts(tree: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted keys and the values of all texts in a configuration."""
    if isinstance(tree, str):
        yield key, tree
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for name, value in items:
        yield from _texts(value, f"{key}.{name}" if key else str(name))


def _notice(options: Namespace) -> int:
    notice = NOTICE if options.notice is None else int(options.notice)
    if notice < 1:
        raise UserError(f"--notice {notice}: seconds for a checkpoint must be at least 1")
    return notice


def _workers(options: Namespace, command: Sequence[str]) -> int:
    """How many processes are asked for, or devices the run describes; raises UserError where the command is no run of ours."""
    if options.workers is not None:
        return int(options.workers)
    if options.book:
        return max(read_book(options.book).layouts)
    config = _config(command)
    if config is None:
        raise UserError(f"{command[0]}: how many processes? give --workers N, as for any program but a run of mindllm")
    return config.parallel_config.device_num


def refuse_other_layouts(book: LayoutBook, command: Sequence[str]) -> None:
    """Raise UserError where a layout of the book cannot be loaded with the command's options, or is not what the book says."""
    for devices in book.layouts:
        words = book.command(command, devices)
        config = _config(words)
        if config is None:
            return
        found = {"devices": config.parallel_config.device_num, "sequences a step": config.global_batch_size}
        for told, count in {"devices": devices, "sequences a step": book.global_batch}.items():
            if found[told] != count:
                raise UserError(
                    f"--book {book.path}: {book.layouts[devices]} has {found[told]} {told} where the book says {count}; "
                    "options of the command hold for every layout: leave out those that set its parallelism or batch"
                )


def shared_directory(command: Sequence[str], log_dir: Path) -> Path:
    """The directory that all nodes of a job share: ``output_dir`` of our runs, and of another program where its logs go."""
    config = _config(command)
    return log_dir if config is None else Path(config.output_dir)


def _config(command: Sequence[str]) -> RunConfig | None:
    """The configuration of a run of ours; None of another program. It takes a second to read, and one node needs none."""
    if Path(command[0]).name != "run_llm.py":
        return None
    from mindllm.cli.run_options import read_config

    return read_config(command[1:])[1]


if __name__ == "__main__":
    run_command(main)
