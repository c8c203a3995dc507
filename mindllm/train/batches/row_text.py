"""Rows as the text of a run: conversations, and MindRecord files of ready samples."""

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
ROWS_WORTH_A_BAR = 2000
NAMED = 3  # bad rows, of all that are counted
LOADER = "train_dataset.data_loader.config"


class RowText:
    """Rows of ``source``, split as ``section`` says. Their frequencies and bytes are not those of running text: no baseline."""

    def __init__(self, config: RunConfig, section: DataConfig, source: RowSource) -> None:
        self.config = config
        self.section = section
        self.source = source
        self.seq_length = config.model.config.seq_length

    @property
    def row_count(self) -> int:
        """Rows that are split among training and evaluation."""
        most = self.section.max_rows if isinstance(self.section, ConversationDataConfig) else None
        return min(len(self.source), most or len(self.source))

    def numbers(self, split: str) -> range:
        """Returns the rows of part ``split``; raises UserError when there are none."""
        rows = split_ranges(self.section.split, self.row_count)[split]
        if not rows:
            raise self.config.error(
                "train_dataset.data_loader.config.split",
                f"{self.section.split} of {self.row_count} rows leaves none for {split}; give it a larger weight",
            )
        return rows

    def usable(self, split: str) -> np.ndarray:
        """Returns the numbers, int64 [n], of the rows of a part that samples are made of; errors as ``numbers``."""
        rows = self.numbers(split)
        return np.arange(rows.start, rows.stop)

    def train_dataset(self) -> RowDataset:
        """Rows of the train part, each in a sample of its own."""
        return self._dataset(Packs.single(self.usable("train")), packed=False)

    def _dataset(self, packs: Packs, packed: bool) -> RowDataset:
        return RowDataset(self.source, packs, self.seq_length, self.config.seed, packed=packed)

    def held_out(self, split: str) -> HeldOutRows:
        """Rows of another part, in order."""
        return HeldOutRows(self.source, self.usable(split).tolist(), self.seq_length)

    def unigram_loss(self, split: str) -> None:
        """Unknown."""

    def bytes_per_token(self, split: str, samples: int) -> None:
        """Unknown."""


class MindRecordText(RowText):
    """The rows of MindRecord files."""

    def __init__(self, config: RunConfig, section: RowsDataConfig) -> None:
        length = config.model.config.seq_length
        super().__init__(config, section, MindRecordRows(section.data_paths, length, section.shifted_labels))


class CheckedText(RowText):
    """Rows of which each is read once before the run begins, or a bad one would end it later."""

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
        """The rows of a part that are what they should be.

        Raises:
            UserError: some are not and ``skip_bad_rows`` is false, or none is.
        """
        if split not in self._usable:
            rows = self.numbers(split)
            looked_at = self._counted(rows, "checking rows")
            faults = {number: fault for number in looked_at if (fault := self.source.fault(number))}
            self._refuse_or_tell(split, len(rows), list(faults.values()))
            self._usable[split] = np.array([number for number in rows if number not in faults], dtype=np.int64)
        return self._usable[split]

    def _counted(self, rows: Sequence[int], doing: str) -> Iterable[int]:
        """``rows``, of which is told how far they are where there are many."""
        return counted(rows, doing, self._progress if len(rows) > ROWS_WORTH_A_BAR else unwatched)

    def _refuse_or_tell(self, split: str, count: int, faults: Sequence[str]) -> None:
        if not faults:
            return
        some = "\n".join([*faults[:NAMED], *(["…"] if len(faults) > NAMED else [])])
        if self.section.skip_bad_rows and len(faults) < count:
            logger.warning("%d of %d rows of %s cannot be used and are left out:\n%s", len(faults), count, split, some)
            return
        advice = "" if len(faults) == count else f"; mend them, or write {LOADER}.skip_bad_rows: true"
        raise UserError(f"{len(faults)} of {count} rows of {split} cannot be used{advice}\n{some}")


class PreferenceText(CheckedText):
    """Pairs of answers, or answers that are desirable or not, each in a sample of its own."""

    source: PairRows

    def __init__(
        self, config: RunConfig, section: PreferenceDataConfig, tokenizer: Tokenizer, progress: Progress = unwatched
    ) -> None:
        length, learnt = config.model.config.seq_length, config.preference
        rows: PairRows
        if learnt.is_unpaired:
            alone = not learnt.estimates_divergence
            rows = AnswerRows(section.data_paths, tokenizer, length, alone=alone, **section.chat)
        else:
            rows = PairRows(section.data_paths, tokenizer, length, **section.chat)
        super().__init__(config, section, rows, progress)

    @cached_property
    def counts(self) -> PairCounts | AnswerCounts:
        """What the pairs of the train part come to."""
        return self.source.count(self._counted(self.usable("train").tolist(), "measuring pairs"))

    def train_dataset(self) -> PairDataset:
        """Pairs of the train part."""
        return PairDataset(self.source, Packs.single(self.usable("train")), self.seq_length, self.config.seed)

    def held_out(self, split: str) -> HeldOutPairs:
        """Pairs of another part, in order."""
        return HeldOutPairs(self.source, self.usable(split).tolist(), self.seq_length)


class InstructionText(CheckedText):
    """Conversations. With packing, all rows of the train part are tokenized once when training begins, to know their lengths."""

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
        """What the rows of the train part come to."""
        return self.source.count(self._counted(self.usable("train").tolist(), "measuring rows"))

    def train_dataset(self) -> RowDataset:
        """Rows of the train part, packed if the section says so; rows from which nothing is learnt are left out of packs."""
        if not self.packing:
            return super().train_dataset()
        logger.info(self.counts.describe(self.seq_length))
        rows = self.usable("train")
        useful = np.flatnonzero(self.counts.places)
        if not len(useful):
            raise self.config.error(
                "model.model_config.seq_length", f"no row has an answer within its first {self.seq_length + 1} tokens"
            )
        groups = pack(self.counts.places[useful], self.seq_length, self.config.seed)
        full = self.counts.places.sum() / (len(groups) * self.seq_length)
        logger.info(
            "%d rows packed into %d samples of %d, %.1f%% full", len(useful), len(groups), self.seq_length, 100 * full
        )
        return self._dataset(Packs.of([rows[useful[group]] for group in groups]), packed=self.packing is True)
