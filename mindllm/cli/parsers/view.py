"""The options of ``mindllm view``."""

from __future__ import annotations

import argparse

from mindllm.cli.registry import spelled
from mindllm.command import CommandParser, positive

EXAMPLE = """example:
  %(prog)s configs/llama2/finetune_llama2_tiny.yaml --sample 3
  %(prog)s run.yaml --train_dataset.data_loader.config.packing=false --count
"""


def make_parser() -> CommandParser:
    """Returns the parser of the command line."""
    parser = CommandParser(
        prog=spelled("view"),
        takes_keys=True,
        description="Shows the samples of a run as its model gets them: trained tokens green, those only read dim, documents "
        "that do not see each other apart. Further options change keys of the configuration, as with run_llm.py.",
        epilog=EXAMPLE,
    )
    parser.add_argument(
        "--config", required=True, metavar="YAML", help="the run; also without --config, as the first word"
    )
    parser.add_argument("--sample", type=_number, default=0, metavar="N", help="which sample of the run (default 0)")
    parser.add_argument("--samples", type=positive, default=1, metavar="COUNT", help="how many from there (default 1)")
    parser.add_argument("--ids", action="store_true", help="token by token, with numbers")
    parser.add_argument("--count", action="store_true", help="tokenize all rows of conversations: lengths, truncation")
    parser.add_argument("--json", action="store_true", help="one JSON object for each sample")
    return parser


def _number(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 0 on")
    return value
