"""MindRecord files of ready samples, as MindFormers writes them: the one file of this room that knows MindSpore.

Rows are read by number through MindSpore's own reader; nothing but the number of rows is held.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mindllm.data.rows import Row
from mindllm.errors import UserError
from mindllm.files import unexpanded

LABELS = ("labels", "target_ids")
LOSS_MASK, POSITIONS = "loss_mask", "position_ids"
IGNORED = -100  # the label of a token without loss


class MindRecordRows:
    """Rows with a column ``input_ids`` of ``seq_length`` + 1 tokens, and optionally a column of LABELS of the same length.

    ``labels[i]`` belongs to token i, as in MindFormers, which shifts inputs against labels in the model; -100 has no loss. Labels
    of ``shifted`` rows belong to the next token: both columns have ``seq_length`` tokens, with optional columns ``loss_mask`` (0
    and 1) and ``position_ids`` (0, 1, …).

    Raises:
        UserError: files are not MindRecord, rows have another length, or shifted columns are not supported.
    """

    def __init__(self, paths: Sequence[str], seq_length: int, shifted: bool = False) -> None:
        self.paths = list(paths)
        self.seq_length = seq_length
        self.shifted = shifted
        for path in self.paths:
            for file in (path, f"{path}.db"):
                if not Path(file).is_file():
                    raise UserError(
                        f"{file}: no such file; a MindRecord file is NAME with its index NAME.db{unexpanded(path)}"
                    )
        self._count, columns = self._open()
        if "input_ids" not in columns:
            raise UserError(f"{self.paths[0]}: no column input_ids; found: {', '.join(sorted(columns))}")
        self._columns = ["input_ids", *[name for name in LABELS if name in columns][:1]]
        if shifted:
            if len(self._columns) == 1:
                raise UserError(
                    f"{self.paths[0]}: no column labels, which rows with shifted_labels need; found: {', '.join(sorted(columns))}"
                )
            self._columns += [name for name in (LOSS_MASK, POSITIONS) if name in columns]

    def _open(self) -> tuple[int, dict[str, Any]]:
        from mindspore.mindrecord import FileReader

        try:
            reader = FileReader(self.paths)
            count, columns = reader.len(), reader.schema()
            reader.close()
        except (RuntimeError, ValueError) as error:
            raise UserError(f"{', '.join(self.paths)}: cannot be read as MindRecord ({_first_line(error)})") from error
        return int(count), columns

    def __len__(self) -> int:
        return self._count

    def rows(self, numbers: Sequence[int]) -> list[Row]:
        """Return the rows of these numbers, in this order."""
        from mindspore.dataset import MindDataset, SubsetSampler

        indices = sorted(set(numbers))  # MindSpore takes no more numbers than there are rows
        if not indices:
            return []
        dataset = MindDataset(
            self.paths, columns_list=self._columns, sampler=SubsetSampler(indices), num_parallel_workers=1
        )
        try:
            records = list(dataset.create_tuple_iterator(num_epochs=1, output_numpy=True))
        except RuntimeError as error:
            raise UserError(f"{', '.join(self.paths)}: cannot be read ({_first_line(error)})") from error
        by_number = dict(zip(indices, records, strict=True))
        if self.shifted:
            return [
                self._shifted_row(number, dict(zip(self._columns, by_number[number], strict=True)))
                for number in numbers
            ]
        return [self._row(number, *by_number[number]) for number in numbers]

    def _row(self, number: int, input_ids: np.ndarray, labels: np.ndarray | None = None) -> Row:
        lengths = {len(column) for column in (input_ids, labels) if column is not None}
        if lengths != {self.seq_length + 1}:
            raise UserError(
                f"{self.paths[0]}: row {number} has {' and '.join(map(str, sorted(lengths)))} tokens, not seq_length + 1 = "
                f"{self.seq_length + 1}; set model.model_config.seq_length to {min(lengths) - 1}"
            )
        trained = np.ones(len(input_ids), dtype=bool) if labels is None else labels != IGNORED
        return Row(input_ids.astype(np.int32), trained)

    def _shifted_row(self, number: int, columns: dict[str, np.ndarray]) -> Row:
        """Return inputs and the last label as one row; raise if a row cannot express the columns."""
        place = f"{self.paths[0]}: row {number}"
        inputs, labels = columns["input_ids"], columns[self._columns[1]]
        for name, column in columns.items():
            if column.shape != (self.seq_length,):
                raise UserError(
                    f"{place} has {len(column)} values in {name}, not seq_length = {self.seq_length}; set "
                    f"model.model_config.seq_length to {len(column)}, or shifted_labels to false if it is 1 less"
                )
        mask = columns.get(LOSS_MASK, np.ones(self.seq_length, np.float32))
        if not np.isin(mask, (0, 1)).all():
            raise UserError(f"{place}: {LOSS_MASK} holds weights; a token's loss counts (1) or does not (0)")
        positions = columns.get(POSITIONS, np.arange(self.seq_length))
        if not np.array_equal(positions, np.arange(self.seq_length)):
            raise UserError(f"{place}: {POSITIONS} are not 0, 1, 2, …; give every document a row of its own")
        trained = (labels != IGNORED) & (mask == 1)
        expected = np.append(inputs[1:], labels[-1])
        if (wrong := np.flatnonzero(trained & (labels != expected))).size:
            at = int(wrong[0])
            raise UserError(
                f"{place}: label {at} is {labels[at]}, and the token after input {at} is {expected[at]}: these labels are "
                "not the inputs one place ahead"
            )
        last = labels[-1:] if trained[-1] else inputs[-1:]  # no loss: whatever the model knows
        return Row(np.append(inputs, last).astype(np.int32), np.append(True, trained))


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
