"""``mindllm launch``, and ``python -m mindllm.launch`` of ``scripts/msrun_launcher.sh``: start a run as several processes."""

from __future__ import annotations

import re
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindllm.cli.nodes import RankOutput, add_node_options, has_ascend_devices, log_line, on_this_node, scheduled
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

DESCRIPTION = "Starts a training script as several processes that train one model together."
EXAMPLES = """examples:
  %(prog)s --workers 2 "run_llm.py --config configs/llama2/pretrain_llama2_tiny.yaml \\
      --use_parallel true --parallel_config.data_parallel=2 --batch_size 8"

Each rank writes {log_dir}/worker_{rank}.log; the output of rank 0 is also printed. If a rank fails, the others are ended
and the end of its log is printed. SIGTERM and Ctrl-C stop all ranks after the same step. The exit code is that of the
command.
"""
TIMEOUT = 7200  # seconds in which nodes connect
TIME, NOTICE = "24:00:00", 300  # defaults of a Slurm job: its time limit, and seconds for a last checkpoint
TARGETS = {  # kinds of job files that have each option
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
    """Return the parser of ``mindllm launch``."""
    parser = module_parser("mindllm launch", "train")
    parser.set_defaults(msrun=has_ascend_devices())
    return parser


def module_parser(prog: str = "python -m mindllm.launch", script: str = "run_llm.py") -> CommandParser:
    """Return the parser of the command line; ``script`` is the command of its example."""
    parser = CommandParser(prog=prog, description=DESCRIPTION, epilog=EXAMPLES.replace("run_llm.py", script))
    add = parser.add_argument
    add("command", help="script, or verb such as train, with its arguments in quotes")
    add("--workers", type=int, metavar="N", help="processes on all nodes (default: devices of the run)")
    add_node_options(parser, timeout=TIMEOUT)
    logs = "directory for logs (default: %(default)s)"
    add("--log-dir", type=output_directory, default="output/msrun_log", metavar="DIR", help=logs)
    shared = (
        "directory shared by all nodes, to find each other (default: output_dir of the run; other programs: --log-dir)"
    )
    add("--shared-dir", type=output_directory, metavar="DIR", help=shared)
    restart = "restart a failed job up to N times from its last valid checkpoint (default: %(default)s)"
    add("--restart", type=int, default=0, metavar="N", help=restart)
    book = "plan book of mindllm configure --spares: with fewer nodes, a start or restart uses the layout for them"
    add("--book", type=Path, metavar="FILE", help=book)
    patience = f"time to wait for lost nodes before a smaller layout is used (default: {PATIENCE_SECONDS:g})"
    add("--patience", type=float, metavar="SECONDS", help=patience)
    add("--msrun", action="store_true", help="start the ranks with MindSpore's msrun (default on Ascend devices)")
    _add_job_options(parser)
    add("--check", action="store_true", help="validate the options without starting anything")
    return parser


def _add_job_options(parser: CommandParser) -> None:
    """Add the options of a job file for the scheduler of a cluster."""
    add = parser.add_argument_group("job file, written to standard output instead of starting the run").add_argument
    add(
        "--slurm",
        action="store_true",
        help="write a script for sbatch; --local-workers: devices of a node (default: 8)",
    )
    kubernetes = "write the manifest of a Volcano Job, or of an AscendJob of MindCluster's Ascend operator"
    add("--kubernetes", choices=KINDS, help=kubernetes)
    add("--image", metavar="IMAGE", help="image of the pods, with CANN, MindSpore and mindllm")
    claim = (
        "PersistentVolumeClaim for data, configuration and output_dir, and its mount point; repeatable, the first is the "
        "working directory"
    )
    add("--claim", action="append", metavar="CLAIM:/DIRECTORY", help=claim)
    add("--time", metavar="LIMIT", help=f"time limit in the format of sbatch (default: {TIME})")
    notice = (
        "seconds before the time limit at which a checkpoint is saved and the job is queued again; pods: grace period "
        f"(default: {NOTICE})"
    )
    add("--notice", type=int, metavar="SECONDS", help=notice)
    tasks = "one task per node, which starts its ranks (default), or one per device"
    add("--tasks", choices=("node", "device"), help=tasks)
    add("--sbatch", action="append", metavar="OPTION", help="additional option of sbatch; repeatable")
    python = "interpreter on the nodes (default: python of the active environment; --setup can activate one)"
    add("--python", metavar="PATH", help=python)
    add("--setup", action="append", metavar="LINE", help="shell line before the run; repeatable")


def main(arguments: Sequence[str] | None = None, parser: CommandParser | None = None) -> int:
    """Start several processes as one job and wait for it; return the exit code of the command."""
    options, rest = (parser or make_parser()).parse_known_args(arguments)
    if rest:
        # argparse takes the value of an unknown option for the command
        is_command = " " in options.command or options.command in MODES or Path(options.command).suffix
        quoted = f'"{options.command if is_command else "train --config FILE"} {rest[0]} ..."'
        raise UserError(f"{rest[0]}: unknown option of launch; quote the script with its options: {quoted}")
    _refuse_unused_options(options)
    if options.slurm or options.kubernetes:
        text = write_slurm(options) if options.slurm else write_manifest(options)
        mounts = [directory for _, directory in map(claim_of, options.claim or ())]
        for warning in job_warnings(command_of(options.command), mounts):
            log_line(f"warning: {warning}")
        sys.stdout.write(text)
        return 0
    command = tuple(command_of(options.command))
    job = on_this_node(_job(options, command, _worker_count(options, command)), options, scheduled(options))
    refuse_impossible(job)
    if job.book is not None:
        refuse_other_layouts(job.book, command)
    if options.check:
        return 0
    if job.has_other_nodes and not options.shared_dir:
        job = replace(job, shared_dir=shared_directory(command, job.log_dir))
    return launch(job, log_line, RankOutput())


def _job(options: Namespace, command: tuple[str, ...], workers: int) -> Launch:
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


def _refuse_unused_options(options: Namespace) -> None:
    """Raise UserError for options of a plan book or a job file without one."""
    if options.patience is not None and not options.book:
        raise UserError("--patience requires --book")
    if options.slurm and options.kubernetes:
        raise UserError("--slurm and --kubernetes exclude each other; remove one")
    for name, targets in TARGETS.items():
        if getattr(options, name) is not None and not any(getattr(options, target) for target in targets):
            raise UserError(f"--{name} requires {' or '.join(f'--{target}' for target in targets)}")


def write_slurm(options: Namespace) -> str:
    """Return the script for ``sbatch``."""
    nodes, local, words, name = _job_words(options, options.restart)
    notice, tasks = _notice(options), local if options.tasks == "device" else 1
    time, setup, additional = options.time or TIME, options.setup or (), options.sbatch or ()
    return SlurmScript(name, words, nodes, tasks, time, notice, setup, additional).text()


def write_manifest(options: Namespace) -> str:
    """Return the manifest for ``kubectl apply``; the operator restarts failed pods, not the launcher."""
    if not options.image:
        raise UserError("--kubernetes requires --image")
    nodes, local, words, name = _job_words(options, 0)
    claims = [claim_of(claim) for claim in options.claim or ()]
    job = KubernetesJob(
        name, words, nodes, local, options.image, claims, options.restart, _notice(options), options.setup or ()
    )
    return job.text(options.kubernetes)


def _job_words(options: Namespace, restart: int) -> tuple[int, int, list[str], str]:
    """Return the nodes of a job file, the ranks of each, the command of a node and the name of the job."""
    command = tuple(command_of(options.command))
    nodes, local = nodes_of(_worker_count(options, command), options.local_workers)
    defaults = make_parser().parse_args([options.command])
    job = replace(_job(options, command, nodes * local), restart=restart)
    words = launch_words(job, options.command, _job(defaults, command, 1), options.python or "python")
    return nodes, local, words, name_of(command)


def job_warnings(command: Sequence[str], mounts: Sequence[str] = ()) -> list[str]:
    """Return what would stop a run on the nodes of a cluster: local paths, placeholders, a missing proof.

    ``mounts`` are the shared directories of pods.
    """
    config, named = _config(command), config_word(command)
    if config is None or config.source is None or named is None:
        return []
    from mindllm.config.reading.load import tree_of
    from mindllm.prove.found import find_proof, line_about
    from mindllm.run.proof import is_ready

    files = [("--config", named[2]), *_bases(config.source)]
    warnings = [
        f"{where} {path} is an absolute path; use a relative path, or provide the file at this path on every node"
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
    """Yield each base of a YAML with the place that names it."""
    from mindllm.config.reading.load import base_files, read_file

    for file in (source, *base_files(source)):
        if isinstance(base := read_file(file).data.get("base"), str):
            yield f"{file}: base:", base


def _texts(tree: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted key and the value of each text in a configuration."""
    if isinstance(tree, str):
        yield key, tree
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for name, value in items:
        yield from _texts(value, f"{key}.{name}" if key else str(name))


def _notice(options: Namespace) -> int:
    notice = NOTICE if options.notice is None else int(options.notice)
    if notice < 1:
        raise UserError(f"--notice must be at least 1 second (value {notice})")
    return notice


def _worker_count(options: Namespace, command: Sequence[str]) -> int:
    """Return the number of processes: ``--workers``, or the devices of the plan book or of the run."""
    if options.workers is not None:
        return int(options.workers)
    if options.book:
        return max(read_book(options.book).layouts)
    config = _config(command)
    if config is None:
        raise UserError(f"{command[0]}: --workers is missing; only runs of mindllm have a default")
    return config.parallel_config.device_num


def refuse_other_layouts(book: LayoutBook, command: Sequence[str]) -> None:
    """Raise UserError if a layout with the options of the command is invalid, or differs from the plan book."""
    for devices in book.layouts:
        config = _config(book.command(command, devices))
        if config is None:
            return
        actual = {"devices": config.parallel_config.device_num, "sequences per step": config.global_batch_size}
        for name, count in {"devices": devices, "sequences per step": book.global_batch}.items():
            if actual[name] != count:
                raise UserError(
                    f"--book {book.path}: {book.layouts[devices]} has {actual[name]} {name}, but the book {count}; options of "
                    "the command apply to every layout: remove those that set parallelism or batch"
                )


def shared_directory(command: Sequence[str], log_dir: Path) -> Path:
    """Return the directory shared by the nodes of a job: ``output_dir`` of a run, the log directory of another program."""
    config = _config(command)
    return log_dir if config is None else Path(config.output_dir)


def _config(command: Sequence[str]) -> RunConfig | None:
    """Return the configuration of a run of mindllm; None for another program. Loading takes a second."""
    if Path(command[0]).name != "run_llm.py":
        return None
    from mindllm.cli.run import read_config

    return read_config(command[1:])[1]


if __name__ == "__main__":
    run_command(main)
