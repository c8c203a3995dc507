"""The options of ``mindllm launch``, and of ``python -m mindllm.launch``, which ``scripts/msrun_launcher.sh`` calls."""

from __future__ import annotations

from pathlib import Path

from mindllm.cli.registry import spelled
from mindllm.command import CommandParser, output_directory
from mindllm.launch.clusters.kubernetes_job import KINDS
from mindllm.launch.start import HOST, PATIENCE_SECONDS, SEVERAL_NODES_PORT

DEVICES = Path("/dev"), "davinci[0-9]*"  # where there are Ascend devices, MindSpore's msrun starts the ranks
DESCRIPTION = "Runs a training script as several processes of this machine that train one model together."
EXAMPLES = """example:
  %(prog)s --workers 2 "run_llm.py --config configs/llama2/pretrain_llama2_tiny.yaml \\
      --use_parallel true --parallel_config.data_parallel=2 --batch_size 8"

Every rank writes {log_dir}/worker_{rank}.log; what rank 0 writes is printed, too. When a rank fails, the others are ended and
the end of its log is printed. SIGTERM and Ctrl-C stop all ranks after the same step. The exit code is that of the command.
"""


def make_parser() -> CommandParser:
    """Return the parser of the command line."""
    parser = module_parser(spelled("launch"), "train")
    parser.set_defaults(msrun=has_ascend_devices())
    return parser


def has_ascend_devices() -> bool:
    """Whether this machine has Ascend devices."""
    directory, pattern = DEVICES
    return any(directory.glob(pattern))


def module_parser(prog: str = "python -m mindllm.launch", script: str = "run_llm.py") -> CommandParser:
    """Return the parser of the command line; ``script`` is what its example starts."""
    parser = CommandParser(prog=prog, description=DESCRIPTION, epilog=EXAMPLES.replace("run_llm.py", script))
    parser.add_argument("command", help="the script, or a verb such as train, with its arguments, in quotes")
    parser.add_argument(
        "--workers", type=int, metavar="N", help="number of processes, of all nodes (default: the devices of the run)"
    )
    parser.add_argument(
        "--local_workers",
        type=int,
        metavar="N",
        help="those of this node (default: all); in a task of Slurm or a pod it is known, as are address and number of the node",
    )
    parser.add_argument("--master_addr", help=f"address of node 0, where it is reached by the others (default: {HOST})")
    parser.add_argument("--node_rank", type=int, metavar="N", help="number of this node (default: 0)")
    parser.add_argument(
        "--port",
        type=int,
        default=0,
        help="port of node 0 on which they find each other; with several nodes the one after it is used, too, and the default is "
        f"{SEVERAL_NODES_PORT} (one node: a free one)",
    )
    parser.add_argument("--log_dir", type=output_directory, default="output/msrun_log", help="default: %(default)s")
    parser.add_argument(
        "--shared_dir",
        type=output_directory,
        metavar="DIR",
        help="directory of all nodes, for a file by which they know each other (default: the run's output_dir; of another "
        "program than run_llm.py the log directory)",
    )
    parser.add_argument(
        "--timeout", type=int, default=7200, help="seconds after which they give up finding each other (default: 7200)"
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
        "--setup", action="append", metavar="LINE", help="a line of shell before the run; may be repeated"
    )
