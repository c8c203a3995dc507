"""``mindllm data``: turn text into an indexed corpus."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mindllm.command import IMPOSSIBLE, CommandParser, output_file, positive, run_command
from mindllm.errors import RunFailed, UserError
from mindllm.jobs.cores import cores
from mindllm.terminal.console import output, print_json
from mindllm.terminal.progress import Progress
from mindllm.terminal.render import SHARE, drawn

if TYPE_CHECKING:
    from mindllm.data.preprocess.build import Summary
    from mindllm.data.preprocess.sources import Source

EXAMPLE = """example:
  %(prog)s --python-stdlib --train-tokenizer 4096 \\
      --tokenizer data/tokenizer.json --output-prefix data/stdlib
  %(prog)s src/ --include '*.py' --exclude tests \\
      --tokenizer llama/tokenizer.model --output-prefix data/src --workers 8
  %(prog)s web/*.jsonl.zst --json-keys title text \\
      --tokenizer llama/tokenizer.model --output-prefix data/web
  %(prog)s --info data/src
"""
HANDLERS = ("GeneralPretrainHandler", "AlpacaPretrainHandler", "StackOverflowPythonPretrainHandler")
"""Of mindllm.data.preprocess.sources."""


def make_parser() -> CommandParser:
    """Returns the parser of the command line."""
    parser = CommandParser(
        prog="mindllm data",
        description="Turns text and records into an indexed corpus (Megatron's .bin and .idx). A document is a record of a "
        "jsonl, json, csv, tsv or parquet file, or any other file as a whole; .gz, .bz2, .xz and .zst are decompressed. Memory "
        "does not grow with the files. Text is UTF-8: invalid bytes of a text file are replaced by U+FFFD and the files "
        "counted, a record with some is refused. The corpus appears when it is complete; after an interruption the same command "
        "goes on where it was.",
        epilog=EXAMPLE,
    )
    add_input_options(parser.add_argument_group("input"))
    add_output_options(parser.add_argument_group("output"))
    return parser


def add_input_options(group: argparse._ArgumentGroup) -> None:
    """Adds what is read."""
    group.add_argument(
        "inputs", nargs="*", type=Path, metavar="PATH", help="text files, and directories with all below them"
    )
    group.add_argument(
        "--python-stdlib", action="store_true", help="the running Python's standard library, without its tests"
    )
    group.add_argument(
        "--include", action="append", default=[], metavar="PATTERN", help="in directories: only these files"
    )
    group.add_argument(
        "--exclude",
        action="append",
        default=[],
        metavar="PATTERN",
        help="in directories: not these files and directories",
    )
    group.add_argument(
        "--format",
        choices=("auto", "text"),
        default="auto",
        help="auto: records where the name says so (default); text: every file is one document",
    )
    group.add_argument(
        "--json-keys",
        nargs="+",
        default=["text"],
        metavar="KEY",
        help="keys or columns of a record that are its text, joined by line breaks (default text)",
    )
    group.add_argument(
        "--handler-name",
        choices=HANDLERS,
        default="GeneralPretrainHandler",
        help="how a record becomes text: its keys (default), or a form of rows that has a name",
    )
    group.add_argument("--keep-order", action="store_true", help="files in the order of their names, not shuffled")
    group.add_argument(
        "--shuffle-seed",
        type=_not_negative,
        default=0,
        metavar="SEED",
        help="of the order of files (default 0); records keep theirs",
    )
    group.add_argument("--info", type=Path, metavar="PREFIX", help="describe an existing corpus instead of making one")


def add_output_options(group: argparse._ArgumentGroup) -> None:
    """Adds what is made of it, and how."""
    group.add_argument("--tokenizer", type=Path, metavar="FILE", help="tokenizer.json or a sentencepiece .model")
    group.add_argument(
        "--train-tokenizer",
        type=positive,
        metavar="VOCAB_SIZE",
        help="first train FILE, if it is missing: a byte-level BPE (.json) or a sentencepiece BPE (.model)",
    )
    group.add_argument(
        "--allowed-special-tokens",
        nargs="+",
        default=[],
        metavar="NAME",
        help="special tokens that the text may contain, such as '<|fim_prefix|>'; all other names are encoded as words",
    )
    group.add_argument("--output-prefix", type=output_file, metavar="PREFIX", help="of the files that are made")
    group.add_argument(
        "--append-eod",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="end each document with the end-of-text token",
    )
    group.add_argument("--workers", type=positive, default=cores(), metavar="N", help="processes (default: all cores)")
    group.add_argument("--overwrite", action="store_true", help="replace a corpus made from other files or options")
    group.add_argument("--json", action="store_true", help="print the summary as one JSON object")


def _not_negative(text: str) -> int:
    value = int(text)
    if not 0 <= value < 2**32:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 0 to 2^32 - 1")
    return value


def main(arguments: Sequence[str] | None = None) -> int:
    """Makes or describes a corpus; returns the exit code."""
    options = make_parser().parse_args(arguments)

    from mindllm.data.corpus import Corpus
    from mindllm.data.preprocess.report import corpus_description, description_table, summary_dict, summary_lines

    if options.info is not None:
        corpus = Corpus(options.info)
        print_json(corpus_description(corpus)) if options.json else output.print(description_table(corpus))
        return 0
    _check(options)
    try:
        with drawn(*SHARE) as progress:
            summary = _make(options, progress)
    except OSError as error:
        kind = UserError if error.errno in IMPOSSIBLE else RunFailed
        raise kind(f"{error.filename or options.output_prefix}: {error.strerror or error}") from error
    if options.json:
        print_json(summary_dict(summary))
        return 0
    for line in summary_lines(summary):
        output.print(line)
    return 0


def _make(options: argparse.Namespace, progress: Progress) -> Summary:
    from mindllm.data.preprocess.build import build, prepare_tokenizer
    from mindllm.data.preprocess.sources import DocumentReader, shuffled

    sources = _find(options)
    documents = None if options.format == "text" else DocumentReader(tuple(options.json_keys), options.handler_name)
    tokenizer = prepare_tokenizer(options.tokenizer, options.train_tokenizer, sources, documents, progress)
    if options.allowed_special_tokens:
        tokenizer = tokenizer.allowing(options.allowed_special_tokens)
    return build(
        sources if options.keep_order else shuffled(sources, options.shuffle_seed),
        options.output_prefix,
        tokenizer,
        documents=documents,
        append_eod=options.append_eod,
        workers=options.workers,
        overwrite=options.overwrite,
        progress=progress,
    )


def _check(options: argparse.Namespace) -> None:
    if not options.inputs and not options.python_stdlib:
        raise UserError("nothing to read: name files or directories, or use --python-stdlib")
    for name in ("tokenizer", "output_prefix"):
        if getattr(options, name) is None:
            raise UserError(f"--{name.replace('_', '-')} is missing")


def _find(options: argparse.Namespace) -> list[Source]:
    from mindllm.data.preprocess.sources import find_sources, python_standard_library

    sources = find_sources(options.inputs, options.include, options.exclude) if options.inputs else []
    if options.python_stdlib:
        sources += python_standard_library()
    return sources


if __name__ == "__main__":
    run_command(main)
