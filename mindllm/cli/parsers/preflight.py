"""The options of ``mindllm preflight``."""

from __future__ import annotations

from pathlib import Path

from mindllm.cli.registry import spelled
from mindllm.command import CommandParser, duration, port, positive
from mindllm.launch.job import HOST

EXAMPLE = """examples:
  %(prog)s configs/llama2/pretrain_llama2_13b.yaml --workers 8
  %(prog)s run.yaml --workers 16 --local_workers 8 --master_addr 192.168.1.10 --node_rank 1

Exit codes: 0 nothing says no, 2 wrong input, 3 something says no.
"""


def make_parser() -> CommandParser:
    """Returns the parser of the command line."""
    parser = CommandParser(
        prog=spelled("preflight"),
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
