"""What files of conversations or pairs hold, looked at before a run is chosen: their form, bad rows, and how long rows are.

Every row is read once, up to a bound; lengths are measured with the model's own tokenizer and template, of many rows on an even
sample.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from mindllm.data import AnswerRows, InstructionRows, PairRows, load_tokenizer
from mindllm.data.chat.conversations import ANSWERED, ASKED
from mindllm.data.chat.pairs import has_label, is_pair
from mindllm.data.records import KINDS, Record, RecordTable, kind_of, record_files
from mindllm.errors import UserError
from mindllm.terminal.progress import Progress, counted, unwatched

CONVERSATIONS, PAIRS = "CommonDataLoader", "PreferenceDataLoader"
MEASURED = 2000  # rows, of which lengths are taken
CHECKED = 50_000  # rows that are read here; a run reads all of them once more
FIRST = 20  # rows that the form is told by
NAMED = 5  # bad rows, of all that are counted
WITHOUT_END = 1 << 30  # tokens: no row is cut while it is measured
FORMS: tuple[tuple[str, frozenset[str]], ...] = (
    ("auto", frozenset({"messages"})),
    ("auto", frozenset({"conversations"})),
    ("auto", frozenset({"instruction", "output"})),
    ("MOSSMultiTurnHandler", frozenset({"chat"})),
    ("LeetcodePythonInstructionHandler", frozenset({"code_with_problem", "code_only", "explanation_only"})),
    ("ADGenInstructionHandler", frozenset({"content", "summary"})),
    *(("auto", frozenset(keys)) for keys in product(ASKED, ANSWERED)),
)
"""Handlers by the keys that tell them, the usual ones first."""
LABELLED = "labelled"
TELLING = frozenset({"completion", "kto_tag"})
"""Keys by which a label is known to be about the answer; beside a conversation it may be about anything."""
BELLE, BELLE_BEGINS = "BelleMultiTurnInstructionHandler", "Human:"
WANTED = "messages, conversations, instruction and output, prompt and completion (and label), or pairs with chosen and rejected"


@dataclass(frozen=True)
class Survey:
    """What was found.

    Attributes:
        paths: the files, whole paths.
        loader: type of the data loader.
        handler: form of conversations.
        rows: usable ones; of bad ones, where they are left out, none.
        bad: rows that are left out.
        lengths: tokens of measured rows less one, places that each takes in a sample, int64 [measured].
        largest_token: of the measured rows.
        labelled: whether a row has one answer, which is desirable or not.
    """

    paths: tuple[str, ...]
    loader: str
    handler: str
    rows: int
    bad: int
    lengths: np.ndarray
    largest_token: int
    labelled: bool = False

    @property
    def sampled(self) -> bool:
        """Whether lengths are those of a sample."""
        return len(self.lengths) < self.rows

    def length_at(self, quantile: float) -> int:
        """Places that this part of the rows does with."""
        return int(np.quantile(self.lengths, quantile, method="inverted_cdf"))

    def longer_than(self, places: int) -> int:
        """About how many of the rows are."""
        share = float((self.lengths > places).mean())
        return round(share * self.rows) or int((self.lengths > places).any())

    def mean(self, most: int) -> float:
        """Places of a row on average, cut at ``most``."""
        return float(np.minimum(self.lengths, most).mean())


def survey(
    paths: Sequence[Path | str],
    tokenizer: Path | str,
    *,
    skip_bad_rows: bool = False,
    handler: str = "",
    chat: Mapping[str, Any] | None = None,
    unpaired: bool = False,
    progress: Progress = unwatched,
) -> Survey:
    """Look at files of conversations, of pairs of answers or of answers with a label. ``unpaired``: answers are learnt from one
    by one, so pairs are two rows each, and a label beside a conversation says whether its end is desirable. ``chat``: keys of
    the loader that say how conversations are written, such as ``chat_template``.

    Raises:
        UserError: there is no such file, none of records, one that is empty, rows of no known form; or some rows cannot be used
            and ``skip_bad_rows`` is false: they are named by file and line.
    """
    files = _files(paths)
    named = [str(Path(path).resolve()) for path in paths]
    loaded = load_tokenizer(tokenizer)
    kind, form = _form(files, named, handler, unpaired)
    labelled = form == LABELLED
    rows: InstructionRows | PairRows = (
        (AnswerRows if labelled or unpaired else PairRows)(named, loaded, WITHOUT_END, **chat or {})
        if kind == PAIRS
        else InstructionRows(named, loaded, WITHOUT_END, handler=form, **chat or {})
    )
    looked_at = range(min(len(rows), CHECKED))
    faults = {number: fault for number in counted(looked_at, "reading rows", progress) if (fault := rows.fault(number))}
    if faults:
        _refuse(faults, len(looked_at), len(rows), skip_bad_rows)
    good = [number for number in looked_at if number not in faults]
    chosen = [good[at] for at in np.unique(np.linspace(0, len(good) - 1, min(MEASURED, len(good))).astype(int))]
    lengths, largest = _measured(rows, chosen, progress)
    usable = len(good) + len(rows) - len(looked_at)
    return Survey(tuple(named), kind, "" if kind == PAIRS else form, usable, len(faults), lengths, largest, labelled)


def _files(paths: Sequence[Path | str]) -> list[Path]:
    files = record_files([str(path) for path in paths])
    for file in files:
        if kind_of(file) is None:
            text = file.suffix in (".txt", ".md", "")
            advice = (
                "running text is learnt by mindllm pretrain --like DIR FILE" if text else f"write {' or '.join(KINDS)}"
            )
            raise UserError(f"{file}: not a file of conversations; {advice}")
    return files


def _form(files: Sequence[Path], named: Sequence[str], handler: str, unpaired: bool) -> tuple[str, str]:
    """The type of the loader and the handler, by the keys of the first rows that are rows at all; of answers with a label
    LABELLED.
    """
    first = list(_first_rows(files))
    if not first:
        raise UserError(f"{', '.join(named)}: {_why_no_rows(files)}")
    if all(is_pair(row) for row in first):
        return PAIRS, ""
    if all(has_label(row) and (unpaired or TELLING & row.keys()) for row in first):
        return PAIRS, LABELLED
    if handler:
        return CONVERSATIONS, handler
    for form, keys in FORMS:
        if all(keys <= row.keys() for row in first):
            belle = "instruction" in keys and all(str(row["instruction"]).startswith(BELLE_BEGINS) for row in first)
            return CONVERSATIONS, BELLE if belle else form
    if any(keys <= row.keys() for row in first for _, keys in FORMS):
        return CONVERSATIONS, "auto"  # several forms, or rows that are told one by one
    text = "; running text is learnt by mindllm pretrain --like DIR FILE" if "text" in first[0] else ""
    raise UserError(f"{files[0]}: rows of no known form (keys: {', '.join(first[0])}); write {WANTED}{text}")


def _first_rows(files: Sequence[Path]) -> Iterator[Record]:
    """The first rows that can be read; what cannot is told when all are looked at, or at once where none can."""
    table = RecordTable(files)
    for number in range(min(len(table), FIRST)):
        try:
            yield table[number]
        except UserError:
            continue


def _why_no_rows(files: Sequence[Path]) -> str:
    table = RecordTable(files)
    if not len(table):
        return f"holds no rows; write a conversation in each line ({WANTED})"
    try:
        table[0]
    except UserError as error:
        return f"holds no row that can be read; {error}"
    return "holds no row that can be read"


def _refuse(faults: Mapping[int, str], looked_at: int, rows: int, skip: bool) -> None:
    if skip and len(faults) < looked_at:
        return
    some = "\n".join(["", *(f"  {fault}" for fault in [*faults.values()][:NAMED])])
    more = f"\n  and {len(faults) - NAMED} more" if len(faults) > NAMED else ""
    of = f"{looked_at} rows" if rows == looked_at else f"the first {looked_at} rows"
    advice = "" if len(faults) == looked_at else ":\nmend them, or leave them out with --skip_bad_rows"
    raise UserError(f"{len(faults)} of {of} cannot be used{advice}{some}{more}")


def _measured(rows: InstructionRows | PairRows, numbers: Sequence[int], progress: Progress) -> tuple[np.ndarray, int]:
    """Places of these rows and their largest token; of pairs both conversations together."""
    places, largest = [], 0
    for number in counted(numbers, "measuring rows", progress):
        parts = rows.whole_rows(number) if isinstance(rows, PairRows) else [rows.whole_row(number)]
        places.append(sum(part.places for part in parts))
        largest = max([largest, *(int(part.tokens.max()) for part in parts if len(part.tokens))])
    return np.array(places, dtype=np.int64), largest
