"""Options of the verbs that write weights: how a model is rounded, how tensors are written, and the tokenizer beside them."""

from __future__ import annotations

import argparse
from pathlib import Path

from mindllm.command import output_directory, positive
from mindllm.files import size_in_bytes

METHODS = ("rtn", "gptq", "awq")


def add_quantize_options(parser: argparse.ArgumentParser, method: str | None, required: bool = True) -> None:
    """Adds how a model is rounded; ``method`` is the default, None: chosen by what is given."""
    said = f"default {method}" if method else "default gptq with --calibration, else rtn"
    count = None if required else "?"
    parser.add_argument(
        "source", type=Path, nargs=count, metavar="WEIGHTS", help="Hugging Face directory, GGUF file or checkpoint"
    )
    parser.add_argument(
        "target", type=output_directory, nargs=count, metavar="HF_DIRECTORY", help="must not exist, or be empty"
    )
    parser.add_argument("--method", choices=METHODS, default=method, help=f"rtn: to the nearest code ({said})")
    parser.add_argument("--bits", type=int, choices=(4, 8), default=4)
    group = "columns that share a scale (default 128, or the largest power of 2 below that divides all)"
    parser.add_argument("--group", type=positive, metavar="N", help=group)
    parser.add_argument("--calibration", type=Path, metavar="FILE", help="text that gptq and awq look at")
    parser.add_argument("--samples", type=positive, default=64, metavar="N", help="pieces of the text (64)")
    parser.add_argument("--length", type=positive, default=512, metavar="N", help="tokens of a piece (512)")
    parser.add_argument("--act-order", action="store_true", help="gptq: columns with the largest inputs first")
    add_export_options(parser)
    parser.set_defaults(dtype="float16")


def add_export_options(parser: argparse.ArgumentParser) -> None:
    """Adds how a Hugging Face directory is written, and which tokenizer goes with it."""
    add_format_options(parser)
    parser.add_argument(
        "--tokenizer", type=Path, metavar="FILE", help="tokenizer to copy (default: that of the run, where it still is)"
    )


def add_format_options(parser: argparse.ArgumentParser) -> None:
    """Adds how tensors are written."""
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="float32")
    parser.add_argument(
        "--max_shard_size", type=_size, default="5GB", metavar="SIZE", help="largest file of weights (default 5GB)"
    )


def _size(text: str) -> int:
    try:
        return size_in_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
