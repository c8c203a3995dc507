"""The options of ``mindllm quantize``."""

from __future__ import annotations

from pathlib import Path

from mindllm.cli.parsers.weights import add_quantize_options
from mindllm.command import CommandParser

EXAMPLE = """examples:
  %(prog)s models/SmolLM2-135M-Instruct exported/int8 --bits 8
  %(prog)s models/SmolLM2-135M-Instruct exported/int4 --bits 4 --method gptq --calibration text.txt
  %(prog)s --config exported/int4.yaml

What was chosen is written beside the directory, as HF_DIRECTORY.yaml, which --config repeats. Exit codes: 0 good, 1 failure,
2 wrong input, 130 interrupted.
"""


def make_parser() -> CommandParser:
    """Return the parser of the command line."""
    parser = CommandParser(
        prog="mindllm quantize",
        usage="mindllm quantize WEIGHTS HF_DIRECTORY [options]\n       mindllm quantize --config FILE [options]",
        description="Rounds a model to 4 or 8 bits and writes a Hugging Face directory of GPTQ or AWQ: whole or absent.",
        epilog=EXAMPLE,
    )
    add_quantize_options(parser, None, required=False)
    parser.add_argument("--config", type=Path, metavar="FILE", help="options, as this command has written them")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser
