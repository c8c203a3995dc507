"""``mindllm data``: tokenize text into a corpus."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mindllm.command import PATH_ERRORS, CommandParser, output_file, positive, run_command
from mindllm.errors import RunFailed, UserError
from mindllm.jobs.cores import cores
from mindllm.terminal.console import output, print_json
from mindllm.terminal.progress import Progress
from mindllm.terminal.render import SHARE, drawn

if TYPE_CHECKING:
    from mindllm.data.preprocess.build import Summary

EXAMPLE = """examples:
  %(prog)s --python-stdlib --train-tokenizer 4096 \\
      --tokenizer data/tokenizer.json --output-prefix data/stdlib
  %(prog)s src/ --include '*.py' --exclude tests \\
      --tokenizer llama/tokenizer.model --output-prefix data/src --workers 8
  %(prog)s web/*.jsonl.zst --json-keys title text \\
      --tokenizer llama/tokenizer.model --output-prefix data/web
  %(prog)s --info data/src
"""
HANDLERS = ("GeneralPretrainHandler", "AlpacaPretrainHandler", "StackOverflowPythonPretrainHandler")
"""Those of mindllm.data.preprocess.sources."""


def make_parser() -> CommandParser:
    """Return the parser of the command line."""
    parser = CommandParser(
        prog="mindllm data",
        description="Tokenizes text into an indexed corpus (Megatron's .bin and .idx). A document is a record of a jsonl, json, "
        "csv, tsv or parquet file, or a whole file of any other kind; .gz, .bz2, .xz and .zst are decompressed. Memory use is "
        "independent of file sizes. Text is UTF-8: invalid bytes of a text file are replaced by U+FFFD, and invalid records "
        "are refused. The corpus appears when it is complete; after an interruption, the same command continues.",
        epilog=EXAMPLE,
    )
    _add_input_options(parser.add_argument_group("input"))
    _add_output_options(parser.add_argument_group("output"))
    return parser


def _add_input_options(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("inputs", nargs="*", type=Path, metavar="PATH", help="text files, and directories (recursively)")
    add("--python-stdlib", action="store_true", help="the standard library of this Python, without tests")
    add("--include", action="append", default=[], metavar="PATTERN", help="in directories, read only these files")
    exclude = "in directories, skip these files and directories"
    add("--exclude", action="append", default=[], metavar="PATTERN", help=exclude)
    form = "auto: detect records by the file name (default); text: read every file as one document"
    add("--format", choices=("auto", "text"), default="auto", help=form)
    keys = "text keys or columns of a record, joined by line breaks (default: text)"
    add("--json-keys", nargs="+", default=["text"], metavar="KEY", help=keys)
    handler = "conversion of records to text (default: join the text keys)"
    add("--handler-name", choices=HANDLERS, default="GeneralPretrainHandler", help=handler)
    add("--keep-order", action="store_true", help="read files in the order of their names instead of shuffling")
    seed = "seed of the file order (default: 0); records stay in order"
    add("--shuffle-seed", type=_seed, default=0, metavar="SEED", help=seed)
    add("--info", type=Path, metavar="PREFIX", help="describe an existing corpus")


def _add_output_options(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--tokenizer", type=Path, metavar="FILE", help="tokenizer.json or a sentencepiece .model")
    train = "train FILE first if it does not exist: byte-level BPE (.json) or sentencepiece BPE (.model)"
    add("--train-tokenizer", type=positive, metavar="VOCAB_SIZE", help=train)
    special = "special tokens allowed in the text, such as '<|fim_prefix|>'; all others are encoded as text"
    add("--allowed-special-tokens", nargs="+", default=[], metavar="NAME", help=special)
    add("--output-prefix", type=output_file, metavar="PREFIX", help="prefix of the files to write")
    eod = "end each document with the end-of-text token"
    add("--append-eod", action=argparse.BooleanOptionalAction, default=True, help=eod)
    add("--workers", type=positive, default=cores(), metavar="N", help="processes (default: all cores)")
    add("--overwrite", action="store_true", help="replace a corpus of other files or options")
    add("--json", action="store_true", help="print the summary as one JSON object")


def _seed(text: str) -> int:
    value = int(text)
    if not 0 <= value < 2**32:
        raise argparse.ArgumentTypeError(f"must be from 0 to 2^32 - 1 (value {text})")
    return value


def main(arguments: Sequence[str] | None = None) -> int:
    """Build or describe a corpus; return the exit code."""
    options = make_parser().parse_args(arguments)

    from mindllm.data.corpus import Corpus
    from mindllm.data.preprocess.report import corpus_description, description_table, summary_dict, summary_lines

    if options.info is not None:
        corpus = Corpus(options.info)
        print_json(corpus_description(corpus)) if options.json else output.print(description_table(corpus))
        return 0
    if not options.inputs and not options.python_stdlib:
        raise UserError("input is missing; name files or directories, or use --python-stdlib")
    for name in ("tokenizer", "output_prefix"):
        if getattr(options, name) is None:
            raise UserError(f"--{name.replace('_', '-')} is missing")
    try:
        with drawn(*SHARE) as progress:
            summary = _build(options, progress)
    except OSError as error:
        kind = UserError if error.errno in PATH_ERRORS else RunFailed
        raise kind(f"{error.filename or options.output_prefix}: {error.strerror or error}") from error
    if options.json:
        print_json(summary_dict(summary))
        return 0
    for line in summary_lines(summary):
        output.print(line)
    return 0


def _build(options: argparse.Namespace, progress: Progress) -> Summary:
    """Find the sources, train the tokenizer if it does not exist, and build the corpus."""
    from mindllm.data.preprocess.build import build, prepare_tokenizer
    from mindllm.data.preprocess.sources import DocumentReader, find_sources, python_standard_library, shuffled

    sources = find_sources(options.inputs, options.include, options.exclude) if options.inputs else []
    if options.python_stdlib:
        sources += python_standard_library()
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


if __name__ == "__main__":
    run_command(main)
