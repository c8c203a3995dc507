"""The options of ``mindllm weights``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from mindllm.cli.registry import spelled
from mindllm.command import CommandParser, output_directory, positive
from mindllm.files import size_in_bytes

EXAMPLE = """examples:
  %(prog)s info models/llama3-8b
  %(prog)s import models/llama3-8b output/llama3-8b/checkpoint
  %(prog)s export model.Q4_K_M.gguf exported/model --dtype bfloat16
  %(prog)s import llama_rank_0-3_2.ckpt output/llama/checkpoint --model run.yaml
  %(prog)s export output/llama3-8b/checkpoint/llm-400 exported/llama3-8b --dtype bfloat16
  %(prog)s adapter output/llama3-8b_lora/checkpoint/llm-60 exported/adapter
  %(prog)s merge exported/adapter exported/llama3-8b_tuned --base models/llama3-8b --dtype bfloat16
  %(prog)s quantize models/llama3-8b exported/llama3-8b-int4 --method gptq --calibration text.txt

run_llm.py reads a Hugging Face directory itself (--load_checkpoint DIRECTORY); import makes a checkpoint of one.
"""

FORMER_QUANTIZE = "quantise"
METHODS = ("rtn", "gptq", "awq")


def make_parser() -> CommandParser:
    """Returns the parser of the command line."""
    parser = CommandParser(
        prog=spelled("weights"),
        description="Converts weights between Hugging Face directories (config.json, safetensors or pickled tensors, tokenizer) "
        "or those of MindFormers and checkpoints, one tensor in memory at a time. What is written is whole or absent.",
        epilog=EXAMPLE,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    importing = commands.add_parser(
        "import", help="weights of Hugging Face or MindFormers as checkpoint DIRECTORY/llm-0"
    )
    importing.add_argument(
        "source",
        type=Path,
        metavar="WEIGHTS",
        help="Hugging Face directory, GGUF file; or of MindFormers: file, directory, ranks",
    )
    importing.add_argument("target", type=output_directory, metavar="DIRECTORY", help="directory of checkpoints")
    importing.add_argument(
        "--model",
        type=Path,
        metavar="YAML",
        help="for MindFormers: run YAML or Hugging Face directory with the architecture",
    )
    exporting = commands.add_parser("export", help="a checkpoint or GGUF file as Hugging Face directory")
    exporting.add_argument(
        "source",
        type=Path,
        metavar="CHECKPOINT",
        help="checkpoint, or a run for its newest; or GGUF file, Hugging Face directory (in another type)",
    )
    exporting.add_argument("target", type=output_directory, metavar="HF_DIRECTORY", help="must not exist, or be empty")
    add_export_options(exporting)
    _add_adapter_commands(commands)
    _add_quantize_command(commands)
    describing = commands.add_parser("info", help="architecture, files and types of any of them, checked")
    describing.add_argument("path", type=Path, metavar="PATH")
    for command in dict.fromkeys(commands.choices.values()):  # an alias names one a second time
        command.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _add_adapter_commands(commands: Any) -> None:
    adapter = commands.add_parser("adapter", help="what a checkpoint of a tuned model holds, as PEFT reads it")
    adapter.add_argument(
        "source", type=Path, metavar="CHECKPOINT", help="or the output directory of a run, for its newest"
    )
    adapter.add_argument("target", type=output_directory, metavar="PEFT_DIRECTORY", help="must not exist, or be empty")
    merging = commands.add_parser("merge", help="an adapter and its base as one Hugging Face directory")
    merging.add_argument(
        "source", type=Path, metavar="ADAPTER", help="directory of PEFT, or a checkpoint (or run) with adapters"
    )
    merging.add_argument("target", type=output_directory, metavar="HF_DIRECTORY", help="must not exist, or be empty")
    merging.add_argument(
        "--base", type=Path, metavar="WEIGHTS", help="Hugging Face directory or checkpoint (default: the one it names)"
    )
    taking_out = commands.add_parser("unmerge", help="merged weights without the adapter")
    taking_out.add_argument("source", type=Path, metavar="MERGED")
    taking_out.add_argument("adapter", type=Path, metavar="ADAPTER")
    taking_out.add_argument("target", type=output_directory, metavar="HF_DIRECTORY", help="must not exist, or be empty")
    for command in (merging, taking_out):
        add_format_options(command)


def _add_quantize_command(commands: Any) -> None:
    rounding = commands.add_parser(
        "quantize", aliases=[FORMER_QUANTIZE], help="a model of 4 or 8 bits, in files of GPTQ or AWQ"
    )
    add_quantize_options(rounding, METHODS[1])


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
