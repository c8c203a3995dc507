"""The options of ``mindllm configure``."""

from __future__ import annotations

import argparse
from pathlib import Path

from mindllm.command import CommandParser, output_file, positive
from mindllm.executor.option import add_executor_option
from mindllm.process.host_memory import add_memory_option
from mindllm.timing.shipped import DEFAULT, shipped_devices

EXAMPLE = """examples:
  %(prog)s llama2_70b --devices 64 --global-batch 512 --seq 4096 -o run.yaml
  %(prog)s models/Qwen2.5-7B --devices 8 --device atlas_800t_a2
  %(prog)s llama3_8b --at-most 64 --tokens-per-second 100000 --no-attention-recompute

The YAML holds what differs from the network's own run, each key with its reason; the proof lies beside it. Names of shipped
networks: mindllm models. Exit codes: 0 ready, 3 refuted or nothing fits, 1 something could not be proved, 2 wrong input.
"""


def make_parser() -> CommandParser:
    """Return the parser of the command line."""
    parser = CommandParser(
        prog="mindllm configure",
        takes_keys=True,
        usage="mindllm configure NAME|DIR|CONFIG.JSON|YAML --devices N [options] [--section.key=value ...]",
        description="Finds the fastest strategy of a network on a number of devices, plans its stages and recomputation, proves "
        "it, and writes the run: no YAML is needed.",
        epilog=EXAMPLE,
    )
    add = parser.add_argument
    add("network", nargs="?", metavar="NETWORK", help="shipped name, Hugging Face directory, config.json, or YAML")
    add("--config", type=Path, metavar="YAML", help="a run that this command has written: found and proved once more")
    add("--devices", type=positive, metavar="N", help="how many; a multiple of 8, or 1, 2, 4")
    add("--at-most", type=positive, metavar="N", help="no more devices; the fewest that reach --tokens-per-second")
    names = ", ".join(shipped_devices())
    add("--device", default=DEFAULT, metavar="NAME", help=f"a YAML, or one of {names} (default %(default)s)")
    add("--global-batch", type=positive, metavar="B", help="sequences of a step (default: the network's own, or 512)")
    add("--seq", type=positive, metavar="S", help="tokens of a sequence (default: the network's own, at most 4096)")
    add("--data", default="", metavar="PREFIX", help="indexed corpus (mindllm data); none: data stays open")
    add("--memory-limit", metavar="SIZE", help="of a device, as 58GB (default: nine tenths of it)")
    add("--max-tensor-parallel", type=positive, metavar="N", help="ranks at most (default: those of a node)")
    add("--max-stages", type=positive, metavar="N", help="pipeline stages at most")
    add("--no-attention-recompute", action="store_true", help="attention is never computed again")
    add("--tokens-per-second", type=_speed, metavar="X", help="of all devices, at least")
    add("-o", "--output", type=output_file, metavar="YAML", help="the run (default NETWORK_Np.yaml)")
    add(
        "--spares",
        type=int,
        choices=(1, 2),
        metavar="N",
        help="layouts for up to N nodes fewer (1 or 2), and a book of them",
    )
    add(
        "--node-devices",
        type=positive,
        metavar="N",
        help="of a node, for --spares (default: as the device's links say)",
    )
    add("--quick", action="store_true", help="search and plan by formula; nothing is simulated or proved")
    add("--workers", type=positive, metavar="N", help="processes at once in a piece of a proof")
    add_memory_option(parser)
    add_executor_option(parser)
    add("--json", action="store_true", help="print one JSON object")
    return parser


def _speed(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number of tokens a second above 0")
    return value
