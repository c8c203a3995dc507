"""``mindllm quantize``: round a model to 4 or 8 bits."""

from __future__ import annotations

import shlex
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mindllm.cli.weight_options import add_quantize_options
from mindllm.command import CommandParser
from mindllm.errors import UserError, nearest
from mindllm.files import atomic_open, size_text
from mindllm.terminal.console import error_console, output, print_json
from mindllm.terminal.render import drawn

EXAMPLE = """examples:
  %(prog)s models/SmolLM2-135M-Instruct exported/int8 --bits 8
  %(prog)s models/SmolLM2-135M-Instruct exported/int4 --bits 4 --method gptq --calibration text.txt
  %(prog)s --config exported/int4.yaml

What was chosen is written beside the directory, as HF_DIRECTORY.yaml, which --config repeats. Exit codes: 0 good, 1 failure,
2 wrong input, 130 interrupted.
"""
NOT_KEPT = ("config", "json")
PATHS = ("source", "target", "calibration", "tokenizer")


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


def main(arguments: Sequence[str] | None = None) -> int:
    """Quantize, and write what was chosen beside the result; return the exit code."""
    given = list(sys.argv[2:] if arguments is None else arguments)
    options = _options(given)
    from mindllm.recipes.model_source import find_model
    from mindllm.weight_files import QuantizeOptions, quantize_weights

    if options.method is None:
        options.method = "gptq" if options.calibration else "rtn"
        why = "there is a text to look at" if options.calibration else "no --calibration text"
        error_console.print(f"--method {options.method}: {why}")
    model = find_model(options.source)
    for note in model.notes():
        error_console.print(note)
    if model.adapter or model.is_tuned:
        adapter = model.adapter or model.weights
        raise UserError(f"{options.source}: is an adapter; merge it first: mindllm weights merge {adapter} DIR")
    chosen = QuantizeOptions.select(vars(options))
    with drawn() as progress:
        path = quantize_weights(model.weights, options.target, chosen, options.dtype, options.max_shard_size, progress)
    place = path.with_name(f"{path.name}.yaml")
    _write(place, options, given)
    if options.json:
        print_json({"written": str(path), "options": str(place)})
    else:
        output.print(f"wrote {path}")
        again, talk = (
            shlex.join(["mindllm", *words]) for words in (["quantize", "--config", str(place)], ["chat", str(path)])
        )
        error_console.print(f"options: {place} (again: {again}); talk to it: {talk}")
    return 0


def _options(given: Sequence[str]) -> Namespace:
    """The options of the command line over those of ``--config``."""
    parser = make_parser()
    options = parser.parse_args(given)
    if options.config:
        kept = _kept(options.config, vars(options))
        parser.set_defaults(**{name: Path(str(kept.pop(name))) for name in ("source", "target") if name in kept})
        options = parser.parse_args([*_as_options(kept), *given])
    for name, shown in (("source", "WEIGHTS"), ("target", "HF_DIRECTORY")):
        if getattr(options, name) is None:
            raise UserError(f"mindllm quantize: {shown} is missing; write mindllm quantize WEIGHTS HF_DIRECTORY")
    return options


def _kept(file: Path, known: dict[str, Any]) -> dict[str, Any]:
    """The options in a file that this command has written.

    Raises:
        UserError: there is none, or it has something else.
    """
    from mindllm.config.reading.yaml_tree import read_mapping

    kept = dict(read_mapping(file))
    for name in kept:
        if name not in known or name in NOT_KEPT:
            raise UserError(f"{file}: {name}: no option of mindllm quantize{nearest(str(name), known)}")
    return kept


def _as_options(kept: dict[str, Any]) -> list[str]:
    """Options as words of a command line, whose parser judges them."""
    flags = [f"--{name.replace('_', '-')}" for name, value in kept.items() if value is True]
    valued = {name: value for name, value in kept.items() if not isinstance(value, bool)}
    return [*flags, *(word for name, value in valued.items() for word in (f"--{name}", str(value)))]


def _write(place: Path, options: Namespace, given: Sequence[str]) -> None:
    from mindllm.config.reading.yaml_tree import write_yaml

    kept = {name: value for name, value in vars(options).items() if name not in NOT_KEPT and value is not None}
    tree = {name: str(Path(value).resolve()) if name in PATHS else value for name, value in kept.items()}
    tree["max_shard_size"] = size_text(options.max_shard_size)
    with atomic_open(place) as file:
        file.write(f"# Written by: {shlex.join(['mindllm', 'quantize', *given])}\n{write_yaml(tree)}")
