"""``mindllm convert``: convert a YAML of MindFormers."""

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

FORMS = ("mindformers-2",)
EXAMPLE = """examples:
  %(prog)s pretrain_llama2_7b.yaml
  %(prog)s pretrain_llama2_7b.yaml -o configs/llama2_7b.yaml --train_dataset_dir data/wiki.mindrecord
  %(prog)s finetune_qwen3.yaml --pretrained_model_dir models/Qwen3-8B --json
  %(prog)s configs/qwen3/pretrain_qwen3_32b.yaml --to mindformers-2 --runner_config.train_steps=1000 -o qwen3.yaml

All commands read a YAML of MindFormers without conversion; this command shows how each key is interpreted. Options are
keys of MindFormers or of mindllm. MindFormers ignores some of its own keys:
  --mindformers.ignored_keys=as_run      ignore them, as MindFormers does (default)
  --mindformers.ignored_keys=as_written  apply them
Exit codes: 0 converted, 2 a key is unsupported, unknown or inconsistent.
"""
COMMENT = "Converted from {source} by mindllm convert, which lists the effect of every key."
PYNATIVE_COMMENT = (
    "{source} in the form of MindFormers' PyNative trainer, converted by mindllm convert --to mindformers-2."
)


def make_parser() -> CommandParser:
    """Return the parser of the command line."""
    parser = CommandParser(
        prog="mindllm convert",
        takes_keys=True,
        usage="%(prog)s YAML [-o FILE] [--changes] [--to FORM] [--json] [--section.key=value ...]",
        description="Converts a YAML of MindFormers (1.3 to 2.1). A table lists each key as used, translated, without effect or "
        "unsupported, with the reason. The result is a short YAML over a base of configs/, if one fits.",
        epilog=EXAMPLE,
    )
    add = parser.add_argument
    add("source", type=Path, metavar="YAML", help="YAML of MindFormers; with --to, any run")
    add("-o", "--output", type=output_file, metavar="FILE", help="file to write (default: print it)")
    add("--changes", action="store_true", help="list only keys that change results or costs")
    form = f"write a run as {FORMS[0]}: the YAML of the PyNative trainer of MindFormers 2.x"
    add("--to", choices=FORMS, metavar="FORM", help=form)
    add("--json", action="store_true", help="print one JSON object")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Convert one file; return the exit code."""
    options, overrides = make_parser().parse_known_args(arguments)

    from mindllm.config.reading.load import build_config, read_file
    from mindllm.mindformers.reader import convert, is_mindformers
    from mindllm.mindformers.report import account, as_json
    from mindllm.recipes.recipe import removal_note, remove_spares

    if options.output and options.output.exists() and options.output.resolve() == options.source.resolve():
        raise UserError(f"--output {options.output}: would overwrite the input; use another name")
    if options.to:
        return _write_pynative(options, overrides)
    document = read_file(options.source)
    if not is_mindformers(document):
        raise UserError(f"{options.source}: {_why_not_mindformers(document)}")
    conversion = convert(document, overrides)
    text, problem = None, ""
    try:
        text = _short_yaml(build_config(conversion, options.source), options.source, options.output)
    except UserError as error:  # the table of keys is shown first
        problem = str(error)
    if text is not None and options.output and (note := removal_note(options.output, remove_spares(options.output))):
        error_console.print(note)
    for warning in conversion.warnings:
        error_console.print(f"{options.source}: {warning}")
    if options.json:
        print_json(as_json(options.source, conversion, problem, text))
    else:
        for part in account(options.source, conversion, options.changes):
            output.print(part)
        if text is not None:
            _print_result(text, options.output)
    if problem:
        raise UserError(problem)
    return 0


def _print_result(text: str, path: Path | None) -> None:
    """Print the path that was written, or the text if none was."""
    output.print(f"wrote {path}" if path else f"\n{text}", end="\n" if path else "")


def _why_not_mindformers(document: Document) -> str:
    """Return why a YAML is not a YAML of MindFormers, and the fix."""
    from mindllm.config.reading.document import leaves
    from mindllm.config.reading.schema import has_key
    from mindllm.config.run import RunConfig

    if "base" in document.data or all(has_key(RunConfig, path) for path, _ in leaves(document.data)):
        return "is already a YAML of mindllm; to convert it to the form of MindFormers, use --to mindformers-2"
    return "is not a YAML of MindFormers: it has too few keys of MindFormers"


def _write_pynative(options: Namespace, overrides: Sequence[str]) -> int:
    """Write a run in the form of the PyNative trainer of MindFormers 2.x; return the exit code."""
    from mindllm.config.reading.load import load_config
    from mindllm.config.reading.yaml_tree import write_yaml
    from mindllm.mindformers.to_pynative import write_pynative
    from mindllm.parallel.layer_plan import make_plan

    if options.changes:
        raise UserError("--changes does not work with --to; remove it")
    config = load_config(options.source, overrides)
    written = write_pynative(config, make_plan(config).layers)
    text = f"# {PYNATIVE_COMMENT.format(source=options.source.name)}\n{write_yaml(written.tree)}"
    if options.output:
        with naming(options.output), atomic_open(options.output) as file:
            file.write(text)
    if options.json:
        print_json({"yaml": text, "not carried over": written.told})
        return 0
    if written.told:
        output.print(Table("omitted keys; results are unchanged", texts("key", "in MindFormers"), written.told.items()))
    _print_result(text, options.output)
    return 0


def _short_yaml(config: RunConfig, source: Path, path: Path | None) -> str:
    """Return the YAML of a run over the base that fits best, and write it if a path is given."""
    from mindllm.config.reading.shipped import shipped_configs
    from mindllm.config.reading.shorten import short_yaml, write_short

    bases = sorted(shipped_configs().rglob("*.yaml"))
    comment = COMMENT.format(source=source.name)
    return short_yaml(config, bases, comment) if path is None else write_short(config, path, bases, comment)


if __name__ == "__main__":
    run_command(main)
