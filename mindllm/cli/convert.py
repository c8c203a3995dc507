"""``mindllm convert``: turn a YAML of MindFormers into ours."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mindllm.command import CommandParser, output_file, run_command
from mindllm.errors import UserError
from mindllm.files import atomic_open, naming
from mindllm.terminal.console import error_console, output, print_json
from mindllm.terminal.tables import Table, texts

if TYPE_CHECKING:
    from mindllm.config.reading.document import Document
    from mindllm.config.run import RunConfig
    from mindllm.mindformers.reader import Conversion

FORMS = ("mindformers-2",)
EXAMPLE = """examples:
  %(prog)s pretrain_llama2_7b.yaml
  %(prog)s pretrain_llama2_7b.yaml -o configs/ours.yaml --train_dataset_dir data/wiki.mindrecord
  %(prog)s finetune_qwen3.yaml --pretrained_model_dir models/Qwen3-8B --json
  %(prog)s configs/qwen3/pretrain_qwen3_32b.yaml --to mindformers-2 --runner_config.train_steps=1000 -o theirs.yaml

run_llm.py, scripts/dry_run.sh and every tool with --config read a YAML of MindFormers themselves: this shows how.
Options are keys of theirs or of ours, as on the command line of run_llm.py. MindFormers ignores some of its own keys:
  --mindformers.ignored_keys=as_run      they are left out, as its runs were (default)
  --mindformers.ignored_keys=as_written  they are taken at their word
Exit codes: 0 converted, 2 something is refused, unknown, or does not fit together.
"""
TO_PYNATIVE = (
    "The run {source} for MindFormers' PyNative trainer, by {command} --to mindformers-2, read back as the same run."
)
COMMENT = "Converted from {source} by {command}, which says what became of every key."


def make_parser() -> CommandParser:
    """Returns the parser of what is not an override."""
    parser = CommandParser(
        prog="mindllm convert",
        takes_keys=True,
        usage="%(prog)s THEIRS [-o FILE] [--changes] [--to FORM] [--json] [--section.key=value ...]",
        description="Converts a YAML of MindFormers (1.3 to 2.1): each of its keys is used, translated, without effect here, or "
        "refused, and the table says which and why. Ours is written short, over a base of configs/ where one fits.",
        epilog=EXAMPLE,
    )
    parser.add_argument("source", type=Path, metavar="THEIRS", help="YAML of MindFormers; with --to, any run")
    parser.add_argument(
        "-o", "--output", type=output_file, metavar="FILE", help="file to write; without it, it is printed"
    )
    parser.add_argument(
        "--changes", action="store_true", help="show only keys that change what is computed, or what it costs"
    )
    parser.add_argument(
        "--to",
        choices=FORMS,
        metavar="FORM",
        help=f"write a run of ours, or of theirs, as {FORMS[0]} has it: the YAML of MindFormers 2.x's PyNative trainer",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Converts one file; returns the exit code."""
    options, overrides = make_parser().parse_known_args(arguments)

    from mindllm.config.reading.load import read_file
    from mindllm.mindformers.reader import convert, is_mindformers
    from mindllm.mindformers.report import account, as_json
    from mindllm.recipes.spare_files import forget_spares, say_forgotten

    if options.output and options.output.exists() and options.output.resolve() == options.source.resolve():
        raise UserError(f"--output {options.output}: is the file that is read, and would be lost; write another name")
    if options.to:
        return _write_pynative(options, overrides)
    theirs = read_file(options.source)
    if not is_mindformers(theirs):
        raise UserError(f"{options.source}: {_why_not_theirs(theirs)}")
    conversion = convert(theirs, overrides)
    config, problem = _checked(conversion, options.source)
    text = _written(config, options.source, options.output) if config else None
    if text is not None and options.output and (said := say_forgotten(options.output, forget_spares(options.output))):
        error_console.print(said)
    for warning in conversion.warnings:
        error_console.print(f"{options.source}: {warning}")
    if options.json:
        print_json(as_json(options.source, conversion, problem, text))
    else:
        for part in account(options.source, conversion, options.changes):
            output.print(part)
        if text is not None:
            output.print(
                f"wrote {options.output}" if options.output else f"\n{text}", end="\n" if options.output else ""
            )
    if problem:
        raise UserError(problem)
    return 0


def _why_not_theirs(document: Document) -> str:
    """What a YAML is that is none of MindFormers."""
    from mindllm.config.reading.document import leaves
    from mindllm.config.reading.schema import has_key
    from mindllm.config.run import RunConfig

    if "base" in document.data or all(has_key(RunConfig, path) for path, _ in leaves(document.data)):
        return (
            "is a YAML of mindllm already, which every command takes as it is; to write it in MindFormers' form: "
            "--to mindformers-2"
        )
    return "is no YAML of MindFormers: it has hardly a key that only MindFormers has"


def _write_pynative(options: Namespace, overrides: Sequence[str]) -> int:
    """Write any run in the form of MindFormers 2.x's PyNative trainer; return the exit code."""
    from mindllm.config.reading.load import load_config
    from mindllm.config.reading.yaml_tree import write_yaml
    from mindllm.mindformers.to_pynative import write_pynative
    from mindllm.parallel.layer_plan import make_plan

    if options.changes:
        raise UserError("--changes: cuts the table of a conversion to ours; leave it out")
    config = load_config(options.source, overrides)
    written = write_pynative(config, make_plan(config).layers)
    text = f"# {TO_PYNATIVE.format(source=options.source.name, command='mindllm convert')}\n{write_yaml(written.tree)}"
    if options.output:
        with naming(options.output), atomic_open(options.output) as file:
            file.write(text)
    if options.json:
        print_json({"yaml": text, "not carried over": written.told})
        return 0
    table = Table("not carried over; what is computed stays the same", texts("key", "there"))
    for key, told in written.told.items():
        table.add_row(key, told)
    if written.told:
        output.print(table)
    output.print(f"wrote {options.output}" if options.output else f"\n{text}", end="\n" if options.output else "")
    return 0


def _checked(conversion: Conversion, source: Path) -> tuple[RunConfig | None, str]:
    """The configuration, or why there is none."""
    from mindllm.config.reading.load import build_config

    try:
        return build_config(conversion, source), ""
    except UserError as error:
        return None, str(error)


def _written(config: RunConfig, source: Path, output: Path | None) -> str:
    from mindllm.config.reading.shipped import shipped_configs
    from mindllm.config.reading.shorten import short_yaml, write_short

    bases = sorted(shipped_configs().rglob("*.yaml"))
    comment = COMMENT.format(source=source.name, command="mindllm convert")
    if output is None:
        return short_yaml(config, bases, comment)
    return write_short(config, output, bases, comment)


if __name__ == "__main__":
    run_command(main)
