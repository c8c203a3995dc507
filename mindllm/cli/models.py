"""``mindllm models``: list shipped and local models."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindllm.command import CommandParser, run_command
from mindllm.errors import MOST_SUGGESTIONS, UserError, nearest
from mindllm.terminal.console import output, print_json
from mindllm.terminal.tables import Column, Table
from mindllm.units import short_count

if TYPE_CHECKING:
    from mindllm.config.reading.shipped import ShippedModel

EXAMPLE = """examples:
  %(prog)s                       all models with a YAML in configs/
  %(prog)s qwen3                 those with qwen3 in family or name
  %(prog)s models/ output/run    models in these directories
"""


def make_parser() -> CommandParser:
    """Return the parser of the command line."""
    parser = CommandParser(
        prog="mindllm models",
        description="Lists the shipped models by family and size: parameters, sequence length, devices, and pages of docs/ with "
        "their results. For directories and GGUF files, lists the models in them.",
        epilog=EXAMPLE,
    )
    names = "part of a family or model name; or a directory"
    parser.add_argument("names", nargs="*", metavar="NAME|DIR", help=names)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the models; return the exit code."""
    options = make_parser().parse_args(arguments)

    from mindllm.config.reading.shipped import shipped_models

    directories = [Path(name) for name in options.names if "/" in name or Path(name).exists()]
    words = [name for name in options.names if Path(name) not in directories]
    shipped = _matching(shipped_models(), words) if words or not directories else []
    local = list[dict[str, Any]]()
    if directories:
        from mindllm.weight_files import list_models

        local = [entry for directory in directories for entry in list_models(directory)]
    if options.json:
        print_json({"models": [model.to_dict() for model in shipped], "directories": local})
        return 0
    if shipped:
        output.print(_shipped_table(shipped))
        output.print(
            "devices: those of the YAMLs; docs: pages with results. Tests load every YAML and count its parameters."
        )
    if local:
        output.print(_local_table(local))
    return 0


def _matching(models: list[ShippedModel], words: Sequence[str]) -> list[ShippedModel]:
    """Return the models with one of the words in family or name.

    Raises:
        UserError: no model has a word.
    """
    matches = {
        word: [model for model in models if word.lower() in f"{model.family}/{model.name}".lower()] for word in words
    }
    for word, matching in matches.items():
        if not matching:
            names = {name for model in models for name in (model.family, model.name)}
            close = difflib.get_close_matches(word, sorted(names), n=MOST_SUGGESTIONS)
            hint = f"; similar: {', '.join(close)}" if close else nearest(word, {model.family for model in models})
            raise UserError(f"{word}: unknown model or directory{hint}")
    return [model for model in models if not words or any(model in matching for matching in matches.values())]


def _shipped_table(models: Sequence[ShippedModel]) -> Table:
    columns = [Column("family", True), Column("model", True), Column("parameters"), Column("sequence")]
    columns += [Column("type", True), Column("devices"), Column("YAMLs in configs/", True), Column("docs", True)]
    table = Table("", columns, keys=2)
    for model in models:
        lengths = dict.fromkeys(f"{run.seq_length}" for run in model.runs)
        devices = dict.fromkeys(f"{run.devices}" for run in sorted(model.runs, key=lambda run: run.devices))
        files = " ".join(run.file.rpartition("/")[2] for run in model.runs)
        known = [run.docs for run in model.runs if run.docs is not None]
        pages = ", ".join(dict.fromkeys(page for docs in known for page in docs)) or ("none" if known else "unknown")
        figures = (short_count(model.parameters), ", ".join(lengths), model.dtype, ", ".join(devices))
        table.add_row(model.family, model.name, *figures, files, pages)
    return table


def _local_table(entries: Sequence[dict[str, Any]]) -> Table:
    columns = [Column("path", True), Column("kind", True), Column("family", True), Column("parameters")]
    columns += [Column("context"), Column("type", True), Column("GB"), Column("", True)]
    table = Table("", columns)
    for entry in entries:
        count, context = entry.get("parameters"), entry.get("context")
        table.add_row(
            *(entry["path"], entry["kind"], entry.get("family") or "", short_count(count) if count else ""),
            *(str(context or ""), entry.get("dtype") or "", f"{entry['bytes'] / 1e9:.2f}", _remark(entry)),
        )
    return table


def _remark(entry: dict[str, Any]) -> str:
    """Return the remark of a local model: an error, the base of an adapter, the step, or a missing tokenizer."""
    if "error" in entry:
        return entry["error"]
    if entry["kind"] == "adapter":
        return f"{entry['tuner']} of {entry['base']}"
    if entry["kind"] == "checkpoint":
        return f"step {entry['step']}"
    return "" if entry["tokenizer"] else "no tokenizer"


if __name__ == "__main__":
    run_command(main)
