"""``mindllm weights`` and ``mindllm quantize``: import, export, merge and quantize weights."""

from __future__ import annotations

import argparse
import shlex
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mindllm.command import CommandParser, file_size, output_directory, positive
from mindllm.errors import UserError, nearest
from mindllm.files import atomic_open, size_text
from mindllm.terminal.console import error_console, output, print_json
from mindllm.terminal.progress import Progress
from mindllm.terminal.render import BYTES, drawn

WEIGHTS, QUANTIZE = "weights", "quantize"
FORMER_QUANTIZE = "quantise"
METHODS = ("rtn", "gptq", "awq")
EMPTY_TARGET = "directory to write: absent or empty"
EXAMPLES = {
    WEIGHTS: """examples:
  %(prog)s info models/llama3-8b
  %(prog)s import models/llama3-8b output/llama3-8b/checkpoint
  %(prog)s export model.Q4_K_M.gguf exported/model --dtype bfloat16
  %(prog)s import llama_rank_0-3_2.ckpt output/llama/checkpoint --model run.yaml
  %(prog)s export output/llama3-8b/checkpoint/llm-400 exported/llama3-8b --dtype bfloat16
  %(prog)s adapter output/llama3-8b_lora/checkpoint/llm-60 exported/adapter
  %(prog)s merge exported/adapter exported/llama3-8b_tuned --base models/llama3-8b --dtype bfloat16
  %(prog)s quantize models/llama3-8b exported/llama3-8b-int4 --method gptq --calibration text.txt

Runs read a Hugging Face directory without import (--load_checkpoint DIRECTORY).
""",
    QUANTIZE: """examples:
  %(prog)s models/SmolLM2-135M-Instruct exported/int8 --bits 8
  %(prog)s models/SmolLM2-135M-Instruct exported/int4 --bits 4 --method gptq --calibration text.txt
  %(prog)s exported/int4.yaml

The options are written next to the directory as HF_DIRECTORY.yaml, which repeats the command.
Exit codes: 0 success, 1 failure, 2 invalid input, 130 interrupted.
""",
}
UNSAVED = ("config", "json")  # options that the YAML does not repeat
PATHS = ("source", "target", "calibration", "tokenizer")


def make_parser(verb: str = WEIGHTS) -> CommandParser:
    """Return the parser of ``weights`` or ``quantize``."""
    if verb == QUANTIZE:
        parser = CommandParser(
            prog="mindllm quantize",
            usage="%(prog)s WEIGHTS HF_DIRECTORY [options]\n       %(prog)s FILE.yaml [options]",
            description="Quantizes a model to 4 or 8 bits and writes a Hugging Face directory of GPTQ or AWQ.",
            epilog=EXAMPLES[verb],
        )
        _add_quantize_options(parser, None, required=False)
        # accepted for YAML; with it, WEIGHTS and HF_DIRECTORY replace those of the file
        parser.add_argument("--config", type=Path, help=argparse.SUPPRESS)
        parser.add_argument("--json", action="store_true", help="print one JSON object")
        return parser
    parser = CommandParser(
        prog="mindllm weights",
        description="Converts weights between Hugging Face directories (config.json, safetensors or pickled tensors, tokenizer), "
        "directories of MindFormers and checkpoints, with one tensor in memory at a time. Output is complete or absent.",
        epilog=EXAMPLES[verb],
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_conversions(commands)
    _add_adapter_commands(commands)
    quantize = commands.add_parser(QUANTIZE, aliases=[FORMER_QUANTIZE], help="quantize a model with GPTQ or AWQ")
    _add_quantize_options(quantize, METHODS[1])
    info = commands.add_parser("info", help="show architecture, files and types, and verify them")
    info.add_argument("path", type=Path, metavar="PATH")
    for command in dict.fromkeys(commands.choices.values()):  # an alias lists a command twice
        command.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _add_conversions(commands: Any) -> None:
    importing = commands.add_parser("import", help="convert weights of Hugging Face or MindFormers to a checkpoint")
    source = "Hugging Face directory or GGUF file; or file, directory or ranks of MindFormers"
    importing.add_argument("source", type=Path, metavar="WEIGHTS", help=source)
    target = "directory of checkpoints; the checkpoint is DIRECTORY/llm-0"
    importing.add_argument("target", type=output_directory, metavar="DIRECTORY", help=target)
    model = "for MindFormers: YAML of a run or Hugging Face directory with the architecture"
    importing.add_argument("--model", type=Path, metavar="YAML", help=model)
    exporting = commands.add_parser("export", help="convert a checkpoint or GGUF file to a Hugging Face directory")
    source = "checkpoint, output directory of a run (newest), GGUF file, or Hugging Face directory (to change the type)"
    exporting.add_argument("source", type=Path, metavar="CHECKPOINT", help=source)
    exporting.add_argument("target", type=output_directory, metavar="HF_DIRECTORY", help=EMPTY_TARGET)
    _add_export_options(exporting)


def _add_adapter_commands(commands: Any) -> None:
    adapter = commands.add_parser("adapter", help="export the adapter of a checkpoint for PEFT")
    source = "checkpoint, or output directory of a run (newest)"
    adapter.add_argument("source", type=Path, metavar="CHECKPOINT", help=source)
    adapter.add_argument("target", type=output_directory, metavar="PEFT_DIRECTORY", help=EMPTY_TARGET)
    merging = commands.add_parser("merge", help="merge an adapter and its base into a Hugging Face directory")
    source = "directory of PEFT, or checkpoint or output directory of a run with adapters"
    merging.add_argument("source", type=Path, metavar="ADAPTER", help=source)
    merging.add_argument("target", type=output_directory, metavar="HF_DIRECTORY", help=EMPTY_TARGET)
    base = "Hugging Face directory or checkpoint (default: the base that the adapter names)"
    merging.add_argument("--base", type=Path, metavar="WEIGHTS", help=base)
    unmerging = commands.add_parser("unmerge", help="subtract an adapter from merged weights")
    unmerging.add_argument("source", type=Path, metavar="MERGED")
    unmerging.add_argument("adapter", type=Path, metavar="ADAPTER")
    unmerging.add_argument("target", type=output_directory, metavar="HF_DIRECTORY", help=EMPTY_TARGET)
    for command in (merging, unmerging):
        _add_format_options(command)


def _add_quantize_options(parser: argparse.ArgumentParser, method: str | None, required: bool = True) -> None:
    """Add the options of quantization; the default ``method`` None depends on ``--calibration``."""
    default = method or "gptq with --calibration, else rtn"
    count = None if required else "?"
    add = parser.add_argument
    source = "Hugging Face directory, GGUF file or checkpoint" + "; or saved options" * (not required)
    add("source", type=Path, nargs=count, metavar="WEIGHTS" if required else "WEIGHTS|YAML", help=source)
    add("target", type=output_directory, nargs=count, metavar="HF_DIRECTORY", help=EMPTY_TARGET)
    add("--method", choices=METHODS, default=method, help=f"rtn: round to nearest (default: {default})")
    add("--bits", type=int, choices=(4, 8), default=4, help="bits per weight (default: 4)")
    group = "columns per scale (default: 128, or the largest smaller power of 2 that divides all)"
    add("--group", type=positive, metavar="N", help=group)
    add("--calibration", type=Path, metavar="FILE", help="calibration text of gptq and awq")
    add("--samples", type=positive, default=64, metavar="N", help="calibration sequences (default: 64)")
    add("--length", type=positive, default=512, metavar="N", help="tokens per calibration sequence (default: 512)")
    add("--act-order", action="store_true", help="gptq: quantize columns by decreasing activation")
    _add_export_options(parser)
    parser.set_defaults(dtype="float16")


def _add_export_options(parser: argparse.ArgumentParser) -> None:
    """Add the tensor format and the tokenizer of a Hugging Face directory."""
    _add_format_options(parser)
    tokenizer = "tokenizer to copy (default: that of the run, if it exists)"
    parser.add_argument("--tokenizer", type=Path, metavar="FILE", help=tokenizer)


def _add_format_options(parser: argparse.ArgumentParser) -> None:
    dtypes = ("float32", "float16", "bfloat16")
    parser.add_argument("--dtype", choices=dtypes, default="float32", help="type of tensors (default: %(default)s)")
    shard = "largest file of weights (default: 5GB)"
    parser.add_argument("--max-shard-size", type=file_size, default="5GB", metavar="SIZE", help=shard)


def main(arguments: Sequence[str] | None = None, verb: str = WEIGHTS) -> int:
    """Convert, describe or quantize weights; return the exit code."""
    if verb == QUANTIZE:
        return _quantize(list(sys.argv[2:] if arguments is None else arguments))
    options = make_parser().parse_args(arguments)
    if options.command == "info":
        from mindllm.weight_files import describe_weights, description_table, latest_weights

        description = describe_weights(latest_weights(options.path))
        print_json(description) if options.json else output.print(description_table(description))
        return 0
    if options.command == FORMER_QUANTIZE:
        error_console.print(f"{FORMER_QUANTIZE} is deprecated; use mindllm weights quantize")
        options.command = QUANTIZE
    with drawn(*([] if options.command == QUANTIZE else BYTES)) as progress:
        path = _convert(options, progress)
    print_json({"written": str(path)}) if options.json else output.print(f"wrote {path}")
    return 0


def _convert(options: Namespace, progress: Progress) -> Path:
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

    for name in ("source", "adapter", "base"):
        if (path := getattr(options, name, None)) is not None:
            setattr(options, name, latest_weights(path))
    if options.command == "adapter":
        return export_adapter(options.source, options.target)
    if options.command == "import":
        return import_weights(options.source, options.target, options.model, progress)
    if options.command in ("merge", "unmerge"):
        form = {"dtype": options.dtype, "max_shard_bytes": options.max_shard_size}
        if options.command == "merge":
            return merge(options.source, options.target, options.base, form, progress)
        return unmerge(options.source, options.adapter, options.target, form, progress)
    if options.command == QUANTIZE:
        method = QuantizeOptions.select(vars(options))
        return quantize_weights(options.source, options.target, method, options.dtype, options.max_shard_size, progress)
    return export_weights(
        options.source, options.target, options.dtype, options.max_shard_size, options.tokenizer, progress
    )


def _quantize(words: Sequence[str]) -> int:
    """Run ``mindllm quantize``: write the model, and the options next to it; return the exit code."""
    options = _quantize_options(words)
    from mindllm.recipes.model_source import find_model
    from mindllm.weight_files import QuantizeOptions, quantize_weights

    if options.method is None:
        options.method = "gptq" if options.calibration else "rtn"
        reason = "calibration text given" if options.calibration else "no --calibration text"
        error_console.print(f"--method {options.method}: {reason}")
    model = find_model(options.source)
    for note in model.notes():
        error_console.print(note)
    if model.adapter or model.is_tuned:
        adapter = model.adapter or model.weights
        raise UserError(f"{options.source}: is an adapter; merge it first: mindllm weights merge {adapter} DIR")
    method = QuantizeOptions.select(vars(options))
    with drawn() as progress:
        path = quantize_weights(model.weights, options.target, method, options.dtype, options.max_shard_size, progress)
    saved = path.with_name(f"{path.name}.yaml")
    _save_options(saved, options, words)
    if options.json:
        print_json({"written": str(path), "options": str(saved)})
        return 0
    output.print(f"wrote {path}")
    again, chat = (shlex.join(["mindllm", *each]) for each in (["quantize", str(saved)], ["chat", str(path)]))
    error_console.print(f"options: {saved} (repeat: {again}); chat: {chat}")
    return 0


def _quantize_options(words: Sequence[str]) -> Namespace:
    """Return the options of the command line over those of a saved file."""
    parser = make_parser(QUANTIZE)
    options = parser.parse_args(words)
    is_file = options.source is not None and options.source.suffix in (".yaml", ".yml")
    file = options.config or (options.source if is_file else None)
    if file is not None:
        values = _read_options(file, vars(options))
        positional = [str(values.pop(name)) for name in ("source", "target") if name in values]
        saved = parser.parse_args([*positional, *_as_words(values)])
        # options of the command line replace saved ones; a missing positional argument would replace them by None
        options = parser.parse_args(words, Namespace(**vars(saved)))
        for name in ("source", "target"):
            if getattr(options, name) in (None, file):
                setattr(options, name, getattr(saved, name))
    for name, metavar in (("source", "WEIGHTS"), ("target", "HF_DIRECTORY")):
        if getattr(options, name) is None:
            raise UserError(f"mindllm quantize: {metavar} is missing; usage: mindllm quantize WEIGHTS HF_DIRECTORY")
    return options


def _read_options(file: Path, known: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a file that this command has written.

    Raises:
        UserError: the file is missing, or has an unknown option.
    """
    from mindllm.config.reading.yaml_tree import read_mapping

    saved = dict(read_mapping(file))
    for name in saved:
        if name not in known or name in UNSAVED:
            raise UserError(f"{file}: {name}: unknown option of mindllm quantize{nearest(str(name), known)}")
    return saved


def _as_words(saved: dict[str, Any]) -> list[str]:
    """Return saved options as words of a command line, for its parser to validate."""
    flags = [f"--{name.replace('_', '-')}" for name, value in saved.items() if value is True]
    valued = {name: value for name, value in saved.items() if not isinstance(value, bool)}
    return [*flags, *(word for name, value in valued.items() for word in (f"--{name.replace('_', '-')}", str(value)))]


def _save_options(path: Path, options: Namespace, words: Sequence[str]) -> None:
    from mindllm.config.reading.yaml_tree import write_yaml

    saved = {name: value for name, value in vars(options).items() if name not in UNSAVED and value is not None}
    tree = {name: str(Path(value).resolve()) if name in PATHS else value for name, value in saved.items()}
    tree["max_shard_size"] = size_text(options.max_shard_size)
    with atomic_open(path) as file:
        file.write(f"# Written by: {shlex.join(['mindllm', 'quantize', *words])}\n{write_yaml(tree)}")
