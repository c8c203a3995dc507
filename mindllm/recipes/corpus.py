"""Text that a person names as an indexed corpus beside the output of a run: made once, and kept while nothing changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mindllm.data.preprocess.build import Summary, build, is_up_to_date, measure, prepare_tokenizer
from mindllm.data.preprocess.sources import DocumentReader, Source, find_sources, shuffled
from mindllm.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from mindllm.jobs.cores import cores
from mindllm.process.temporary import temporary_directory
from mindllm.terminal.progress import Progress, unwatched
from mindllm.units import counted

DIRECTORY, PREFIX, TOKENIZER = "corpus", "text", "tokenizer.json"


@dataclass(frozen=True)
class PreparedText:
    """A corpus that is there, or would be: its prefix, what was made, its tokenizer and where that is kept.

    ``trained``: the tokenizer was trained on the text.
    """

    prefix: Path
    summary: Summary
    tokenizer: Tokenizer
    tokenizer_file: Path
    trained: bool

    def describe(self) -> str:
        """One line for people."""
        meta = self.summary.meta
        kept = ", as it was" if self.summary.up_to_date else ""
        return f"{counted(meta.documents, 'document')}, {meta.tokens:,} tokens{kept}"


def size_of(paths: Sequence[Path | str]) -> int:
    """Return the bytes of the files that are named; UserError where there are none."""
    return sum(source.size for source in find_sources([Path(path) for path in paths]))


def prepare_text(
    paths: Sequence[Path | str],
    output: Path,
    tokenizer: Path | str,
    vocab_size: int,
    *,
    keys: Sequence[str] = ("text",),
    as_text: bool = False,
    progress: Progress = unwatched,
) -> PreparedText:
    """Make the corpus ``output/corpus/text`` of files, unless it is that already.

    ``tokenizer``: a file of one; empty: one of at most ``vocab_size`` tokens is trained on the text and kept beside the corpus.

    Raises:
        UserError: no file, no text, or a record without ``keys``; named by file and line.
    """
    sources, documents = _asked(paths, keys, as_text)
    prefix, own = output / DIRECTORY / PREFIX, output / DIRECTORY / TOKENIZER
    if tokenizer:
        loaded = load_tokenizer(tokenizer)
    else:
        if own.is_file() and not is_up_to_date(sources, prefix, load_tokenizer(own), documents):
            own.unlink()  # of other text
        own.parent.mkdir(parents=True, exist_ok=True)
        size = None if own.is_file() else vocab_size
        loaded = prepare_tokenizer(own, size, sources, documents, progress, at_most=True)
    overwrite = not is_up_to_date(sources, prefix, loaded, documents)
    summary = build(
        sources, prefix, loaded, documents=documents, workers=cores(), overwrite=overwrite, progress=progress
    )
    return PreparedText(prefix, summary, loaded, loaded.path, not tokenizer)


def look_at_text(
    paths: Sequence[Path | str],
    output: Path,
    tokenizer: Path | str,
    vocab_size: int,
    *,
    keys: Sequence[str] = ("text",),
    as_text: bool = False,
    progress: Progress = unwatched,
) -> PreparedText:
    """Return what :func:`prepare_text` would, and write nothing in ``output``: tokens are counted; errors as there.

    A tokenizer that would be trained is trained in a temporary directory, as the number of tokens depends on it.
    """
    sources, documents = _asked(paths, keys, as_text)
    prefix, own = output / DIRECTORY / PREFIX, output / DIRECTORY / TOKENIZER
    is_own = own.is_file() and is_up_to_date(sources, prefix, load_tokenizer(own), documents)
    with temporary_directory("mindllm-tokenizer-") as directory:
        if tokenizer or is_own:
            loaded = load_tokenizer(tokenizer or own)
        else:
            loaded = prepare_tokenizer(directory / TOKENIZER, vocab_size, sources, documents, progress, at_most=True)
        summary = measure(sources, prefix, loaded, documents=documents, workers=cores(), progress=progress)
    return PreparedText(prefix, summary, loaded, loaded.path if tokenizer else own, not tokenizer)


def _asked(
    paths: Sequence[Path | str], keys: Sequence[str], as_text: bool
) -> tuple[list[Source], DocumentReader | None]:
    """The files in the order they are encoded in, and how documents are read from them."""
    sources = shuffled(find_sources([Path(path) for path in paths]), 0)
    return sources, None if as_text else DocumentReader(tuple(keys))
