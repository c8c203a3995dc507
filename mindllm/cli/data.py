"""What ``mindllm data`` does."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from mindllm.cli.parsers.data import make_parser
from mindllm.command import IMPOSSIBLE, run_command
from mindllm.data.corpus import Corpus
from mindllm.data.preprocess.build import Summary, build, prepare_tokenizer
from mindllm.data.preprocess.documents import DocumentReader
from mindllm.data.preprocess.report import description_of, description_table, summary_lines, summary_of
from mindllm.data.preprocess.sources import Source, find_sources, python_standard_library, shuffled
from mindllm.errors import RunFailed, UserError
from mindllm.terminal.console import output, print_json
from mindllm.terminal.progress import Progress
from mindllm.terminal.render import SHARE, drawn


def main(arguments: Sequence[str] | None = None) -> int:
    """Makes or describes a corpus; returns the exit code."""
    options = make_parser().parse_args(arguments)
    if options.info is not None:
        corpus = Corpus(options.info)
        print_json(description_of(corpus)) if options.json else output.print(description_table(corpus))
        return 0
    _check(options)
    try:
        with drawn(*SHARE) as progress:
            summary = _make(options, progress)
    except OSError as error:
        kind = UserError if error.errno in IMPOSSIBLE else RunFailed
        raise kind(f"{error.filename or options.output_prefix}: {error.strerror or error}") from error
    if options.json:
        print_json(summary_of(summary))
        return 0
    for line in summary_lines(summary):
        output.print(line)
    return 0


def _make(options: argparse.Namespace, progress: Progress) -> Summary:
    sources = _find(options)
    documents = None if options.format == "text" else DocumentReader(tuple(options.json_keys), options.handler_name)
    tokenizer = prepare_tokenizer(options.tokenizer, options.train_tokenizer, sources, documents, progress)
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
    sources = find_sources(options.inputs, options.include, options.exclude) if options.inputs else []
    if options.python_stdlib:
        sources += python_standard_library()
    return sources


if __name__ == "__main__":
    run_command(main)
