"""``mindllm weights``: import, export, merge or quantize weights."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mindllm.cli.weight_options import METHODS, add_export_options, add_format_options, add_quantize_options
from mindllm.command import CommandParser, output_directory, run_command
from mindllm.terminal.console import error_console, output, print_json
from mindllm.terminal.progress import Progress
from mindllm.terminal.render import BYTES, drawn

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
QUANTIZE = "quantize", FORMER_QUANTIZE


def make_parser() -> CommandParser:
    """Returns the parser of the command line."""
    parser = CommandParser(
        prog="mindllm weights",
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Converts or describes; returns the exit code."""
    options = make_parser().parse_args(arguments)
    if options.command == "info":
        from mindllm.weight_files import describe_weights, description_table, latest_weights

        description = describe_weights(latest_weights(options.path))
        print_json(description) if options.json else output.print(description_table(description))
        return 0
    with drawn(*([] if options.command in QUANTIZE else BYTES)) as progress:
        path = _convert(options, progress)
    print_json({"written": str(path)}) if options.json else output.print(f"wrote {path}")
    return 0


def _convert(options: argparse.Namespace, progress: Progress) -> Path:
    from mindllm.weight_files import (
        QuantizeOptions,
        export_adapter,
        export_weights,
        import_weights,
        latest_weights,
        merge,
        quantize_weights,
        unmerge,
    )

    for named in ("source", "adapter", "base"):
        if (path := getattr(options, named, None)) is not None:
            setattr(options, named, latest_weights(path))
    if options.command == "adapter":
        return export_adapter(options.source, options.target)
    if options.command in ("merge", "unmerge"):
        written = {"dtype": options.dtype, "max_shard_bytes": options.max_shard_size}
        if options.command == "merge":
            return merge(options.source, options.target, options.base, written, progress)
        return unmerge(options.source, options.adapter, options.target, written, progress)
    if options.command == FORMER_QUANTIZE:
        error_console.print(f"{FORMER_QUANTIZE}: a former name; write mindllm weights quantize")
    if options.command in QUANTIZE:
        chosen = QuantizeOptions.select(vars(options))
        return quantize_weights(options.source, options.target, chosen, options.dtype, options.max_shard_size, progress)
    if options.command == "import":
        return import_weights(options.source, options.target, options.model, progress)
    written_as = options.dtype, options.max_shard_size, options.tokenizer
    return export_weights(options.source, options.target, *written_as, progress)


if __name__ == "__main__":
    run_command(main)
