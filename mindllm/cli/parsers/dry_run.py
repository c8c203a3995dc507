"""The options of ``mindllm dry-run``."""

from __future__ import annotations

from mindllm.cli.registry import spelled
from mindllm.command import CommandParser, output_directory, patience, positive
from mindllm.executor.option import add_executor_option
from mindllm.process.host_memory import add_memory_option

ADVICE_SECONDS = 20
EXAMPLE = """example:
  %(prog)s configs/llama2/pretrain_llama2_13b.yaml
  %(prog)s run.yaml --stages 0 7 --max_device_memory 54GB --recompute_config.recompute=[8,8]
"""


def make_parser() -> CommandParser:
    """Returns the parser of the command line."""
    parser = CommandParser(
        prog=spelled("dry-run"),
        takes_keys=True,
        description="MindSpore's own dry run of the first rank of every pipeline stage, without a device: what fills its "
        "memory, and whether that fits. Further options change keys of the configuration, as with run_llm.py. "
        "Exit code 0: all stages fit, 3: one does not, 2: wrong input.",
        epilog=EXAMPLE,
    )
    parser.add_argument(
        "--config", required=True, metavar="YAML", help="the run; also without --config, as the first word"
    )
    parser.add_argument("--stages", type=int, nargs="+", metavar="N", help="only these stages (default: all)")
    parser.add_argument("--full", action="store_true", help="simulate whole stages instead of extrapolating small ones")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    parser.add_argument("--max_device_memory", metavar="SIZE", help="the limit, as 58GB (default: the configuration's)")
    parser.add_argument(
        "--output",
        type=output_directory,
        default="output_dryrun",
        metavar="DIR",
        help="for logs and page (output_dryrun)",
    )
    parser.add_argument("--workers", type=positive, metavar="N", help="simulations at once (default: one per core)")
    parser.add_argument(
        "--advice",
        type=patience,
        default=ADVICE_SECONDS,
        metavar="SECONDS",
        help="where a stage does not fit, try changes that would help, and begin none after so long (default: %(default)s)",
    )
    add_memory_option(parser)
    add_executor_option(parser)
    parser.add_argument("--rank_size", type=int, metavar="N", help="devices the configuration must have")
    parser.add_argument("--stage_num", type=int, metavar="N", help="pipeline stages the configuration must have")
    return parser
