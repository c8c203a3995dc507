"""Rows as the data of a run: conversations, preference pairs, and MindRecord files of prepared samples."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np

from mindllm.config import RunConfig
from mindllm.config.dataset import (
    ConversationDataConfig,
    DataConfig,
    InstructionDataConfig,
    PreferenceDataConfig,
    RowsDataConfig,
)
from mindllm.data import (
    AnswerRows,
    HeldOutPairs,
    HeldOutRows,
    InstructionRows,
    MindRecordRows,
    Packs,
    PairDataset,
    PairRows,
    RowDataset,
    RowSource,
    Tokenizer,
    pack,
    split_ranges,
)
from mindllm.data.chat.instruction import RowCounts
from mindllm.data.chat.pairs import AnswerCounts, PairCounts
from mindllm.errors import UserError
from mindllm.terminal.progress import Progress, counted, unwatched

logger = logging.getLogger(__name__)
MIN_ROWS_FOR_PROGRESS = 2000
MAX_NAMED_ROWS = 3
LOADER = "train_dataset.data_loader.config"


class RowText:
    """Rows of ``source``, split by ``section``. They have no unigram baseline, because they are not running text."""

    def __init__(self, config: RunConfig, section: DataConfig, source: RowSource) -> None:
        self.config = config
        self.section = section
        self.source = source
        self.seq_length = config.model.config.seq_length

    @property
    def row_count(self) -> int:
        """Number of rows that are split into training and evaluation."""
        max_rows = self.section.max_rows if isinstance(self.section, ConversationDataConfig) else None
        return min(len(self.source), max_rows or len(self.source))

    def numbers(self, split: str) -> range:
        """Return the row numbers of a split.

        Raises:
            UserError: the split is empty.
        """
        rows = split_ranges(self.section.split, self.row_count)[split]
        if not rows:
            raise self.config.error(
                "train_dataset.data_loader.config.split",
                f"{self.section.split} of {self.row_count} rows leaves no row for {split}; increase its weight",
            )
        return rows

    def usable(self, split: str) -> np.ndarray:
        """Return the numbers of the usable rows of a split, int64 ``[n]``.

        Raises:
            UserError: the split is empty.
        """
        rows = self.numbers(split)
        return np.arange(rows.start, rows.stop)

    def train_dataset(self) -> RowDataset:
        """Return a dataset of the training split with one row per sample."""
        return self._dataset(Packs.single(self.usable("train")), packed=False)

    def _dataset(self, packs: Packs, packed: bool) -> RowDataset:
        return RowDataset(self.source, packs, self.seq_length, self.config.seed, packed=packed)

    def held_out(self, split: str) -> HeldOutRows:
        """Return the rows of another split, in order."""
        return HeldOutRows(self.source, self.usable(split).tolist(), self.seq_length)

    def unigram_loss(self, split: str) -> None:
        """Return None: unknown for rows."""

    def bytes_per_token(self, split: str, samples: int) -> None:
        """Return None: unknown for rows."""


class MindRecordText(RowText):
    """Rows of MindRecord files."""

    def __init__(self, config: RunConfig, section: RowsDataConfig) -> None:
        length = config.model.config.seq_length
        super().__init__(config, section, MindRecordRows(section.data_paths, length, section.shifted_labels))


class CheckedText(RowText):
    """Rows that are checked before the run starts, because a bad row would end it later."""

    source: InstructionRows | PairRows
    section: ConversationDataConfig

    def __init__(
        self,
        config: RunConfig,
        section: ConversationDataConfig,
        source: InstructionRows | PairRows,
        progress: Progress = unwatched,
    ) -> None:
        super().__init__(config, section, source)
        self._progress = progress
        self._usable: dict[str, np.ndarray] = {}

    def usable(self, split: str) -> np.ndarray:
        """Return the numbers of the valid rows of a split, int64 ``[n]``.

        Raises:
            UserError: a row is invalid and ``skip_bad_rows`` is false, or no row is valid.
        """
        if split not in self._usable:
            rows = self.numbers(split)
            numbers = self._with_progress(rows, "checking rows")
            faults = {number: fault for number in numbers if (fault := self.source.fault(number))}
            self._report_faults(split, len(rows), list(faults.values()))
            self._usable[split] = np.array([number for number in rows if number not in faults], dtype=np.int64)
        return self._usable[split]

    def _with_progress(self, rows: Sequence[int], description: str) -> Iterable[int]:
        """Return ``rows``, with progress reported if there are many."""
        return counted(rows, description, self._progress if len(rows) > MIN_ROWS_FOR_PROGRESS else unwatched)

    def _report_faults(self, split: str, count: int, faults: Sequence[str]) -> None:
        if not faults:
            return
        examples = "\n".join([*faults[:MAX_NAMED_ROWS], *(["…"] if len(faults) > MAX_NAMED_ROWS else [])])
        if self.section.skip_bad_rows and len(faults) < count:
            logger.warning("skipped %d of %d invalid rows of %s:\n%s", len(faults), count, split, examples)
            return
        advice = "" if len(faults) == count else f"; correct them, or write {LOADER}.skip_bad_rows: true"
        raise UserError(f"{len(faults)} of {count} rows of {split} are invalid{advice}\n{examples}")


class PreferenceText(CheckedText):
    """Preference pairs, or answers labeled desirable or undesirable, one per sample."""

    source: PairRows

    def __init__(
        self, config: RunConfig, section: PreferenceDataConfig, tokenizer: Tokenizer, progress: Progress = unwatched
    ) -> None:
        length, preference = config.model.config.seq_length, config.preference
        rows: PairRows
        if preference.is_unpaired:
            alone = not preference.estimates_divergence
            rows = AnswerRows(section.data_paths, tokenizer, length, alone=alone, **section.chat)
        else:
            rows = PairRows(section.data_paths, tokenizer, length, **section.chat)
        super().__init__(config, section, rows, progress)

    @cached_property
    def counts(self) -> PairCounts | AnswerCounts:
        """Token counts of the pairs in the training split."""
        return self.source.count(self._with_progress(self.usable("train").tolist(), "measuring pairs"))

    def train_dataset(self) -> PairDataset:
        """Return a dataset of the training split."""
        return PairDataset(self.source, Packs.single(self.usable("train")), self.seq_length, self.config.seed)

    def held_out(self, split: str) -> HeldOutPairs:
        """Return the pairs of another split, in order."""
        return HeldOutPairs(self.source, self.usable(split).tolist(), self.seq_length)


class InstructionText(CheckedText):
    """Conversations. With packing, all rows of the training split are tokenized once at the start to get their lengths."""

    source: InstructionRows

    def __init__(
        self, config: RunConfig, section: InstructionDataConfig, tokenizer: Tokenizer, progress: Progress = unwatched
    ) -> None:
        rows = InstructionRows(
            section.data_paths,
            tokenizer,
            config.model.config.seq_length,
            handler=section.handler,
            **section.chat,
        )
        super().__init__(config, section, rows, progress)
        self.packing = section.packing

    @cached_property
    def counts(self) -> RowCounts:
        """Token counts of the rows in the training split."""
        return self.source.count(self._with_progress(self.usable("train").tolist(), "measuring rows"))

    def train_dataset(self) -> RowDataset:
        """Return a dataset of the training split, packed if requested. Rows without answer tokens are left out of packs."""
        if not self.packing:
            return super().train_dataset()
        logger.info(self.counts.describe(self.seq_length))
        rows = self.usable("train")
        with_answers = np.flatnonzero(self.counts.places)
        if not len(with_answers):
            raise self.config.error(
                "model.model_config.seq_length", f"no row has an answer within its first {self.seq_length + 1} tokens"
            )
        groups = pack(self.counts.places[with_answers], self.seq_length, self.config.seed)
        fill = self.counts.places.sum() / (len(groups) * self.seq_length)
        logger.info(
            "%d rows packed into %d samples of %d, %.1f%% full",
            len(with_answers),
            len(groups),
            self.seq_length,
            100 * fill,
        )
        return self._dataset(Packs.of([rows[with_answers[group]] for group in groups]), packed=self.packing is True)
