"""What is printed about a corpus: the summary of its making and the description of one that exists, as tables or JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.table import Table as RichTable

from mindllm.data.corpus import DEFAULT_SPLIT, SPLITS, Corpus, split_ranges
from mindllm.data.preprocess.build import Summary
from mindllm.terminal.tables import pairs
from mindllm.units import counted

NAMED_FILES = 3


def summary_dict(summary: Summary) -> dict[str, Any]:
    """Return the JSON object of ``--json``: sizes in bytes, time in seconds, absent figures null."""
    meta = summary.meta
    return {
        "documents": meta.documents,
        "tokens": meta.tokens,
        "bytes": meta.bytes,
        "bytes_per_token": meta.bytes / meta.tokens if meta.tokens else None,
        "seconds": round(summary.seconds, 3),
        "files": [str(path) for path in summary.files],
        "tokenizer": str(summary.tokenizer),
        "vocab_size": meta.vocab_size,
        "tokens_per_s": None if summary.up_to_date else round((meta.tokens - summary.resumed_tokens) / summary.seconds),
        "resumed_tokens": summary.resumed_tokens,
        "empty": summary.empty,
        "invalid_utf8": None if summary.up_to_date else len(summary.invalid_utf8),
        "spelled_out": None if summary.up_to_date else dict(summary.spelled_out),
        "up_to_date": summary.up_to_date,
    }


def corpus_description(corpus: Corpus) -> dict[str, Any]:
    """Return the metadata of an existing corpus; figures of missing files are null."""
    meta, dataset = corpus.meta, corpus.dataset
    starts = dataset.document_starts
    ranges = split_ranges(DEFAULT_SPLIT, len(dataset))
    return {
        "prefix": str(corpus.prefix),
        "documents": len(dataset),
        "tokens": dataset.token_count,
        "dtype": dataset.dtype.name,
        "bytes": meta.bytes if meta else None,
        "bytes_per_token": meta.bytes / meta.tokens if meta and meta.tokens else None,
        "tokenizer": meta.tokenizer if meta else None,
        "vocab_size": meta.vocab_size if meta else None,
        "eod_id": meta.eod_id if meta else None,
        "splits": {
            name: {
                "documents": len(ranges[name]),
                "tokens": int(starts[ranges[name].stop] - starts[ranges[name].start]),
            }
            for name in SPLITS
        },
    }


def summary_lines(summary: Summary) -> Iterator[str]:
    """Yield what was made, and which files were not read as they are."""
    figures = summary_dict(summary)
    speed = "" if summary.up_to_date else f" in {summary.seconds:.1f} s, {figures['tokens_per_s']:,} tokens/s"
    if summary.up_to_date:
        yield (f"{summary.files[-1]} is up to date: nothing to do")
    yield (
        f"{counted(figures['documents'], 'document')}, {figures['tokens']:,} tokens, {figures['bytes']:,} bytes "
        f"({_ratio(figures['bytes_per_token'])} bytes per token){speed}"
    )
    if summary.resumed_tokens:
        yield (f"{summary.resumed_tokens:,} tokens were there from a run that was interrupted")
    if summary.empty:
        yield (f"{summary.empty} empty files or records left out")
    if summary.invalid_utf8:
        names = ", ".join(summary.invalid_utf8[:NAMED_FILES]) + (
            ", ..." if len(summary.invalid_utf8) > NAMED_FILES else ""
        )
        yield (f"{len(summary.invalid_utf8)} files are not UTF-8; their invalid bytes were replaced by U+FFFD: {names}")

    if summary.spelled_out:
        most = sorted(summary.spelled_out.items(), key=lambda item: (-item[1], item[0]))
        names = ", ".join(f"{name} {count:,}" for name, count in most[:NAMED_FILES]) + (
            ", ..." * (len(most) > NAMED_FILES)
        )
        count = counted(sum(summary.spelled_out.values()), "name")
        yield f"{count} of special tokens in the text encoded as words: {names} (to keep tokens: --allowed-special-tokens)"


def description_table(corpus: Corpus) -> RichTable:
    """Return the metadata of an existing corpus as a table."""
    description = corpus_description(corpus)
    rows = [(name, _cell(value)) for name, value in description.items() if name != "splits"]
    for name, split in description["splits"].items():
        rows.append(
            (f"{name} ({DEFAULT_SPLIT})", f"{counted(split['documents'], 'document')}, {split['tokens']:,} tokens")
        )
    return pairs(rows)


def _cell(value: object) -> str:
    if value is None:
        return "unknown"
    if isinstance(value, float):
        return _ratio(value)
    return f"{value:,}" if isinstance(value, int) else str(value)


def _ratio(value: float | None) -> str:
    return "no" if value is None else f"{value:.3f}"
