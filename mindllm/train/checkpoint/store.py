"""The checkpoints of one run: saved so that a crash at any moment loses none that was announced, the newest few kept.

A checkpoint is written under a hidden name, every file flushed to the disk, the manifest last, and becomes visible by one
rename (the pattern of Pillai et al., "All File Systems Are Not Created Equal", OSDI 2014). ``save`` returns only after that
rename is on the disk: from then on the checkpoint is announced.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mindllm.errors import UserError
from mindllm.files import sync_directory
from mindllm.train.checkpoint.loading import Checkpoint, is_good, load_checkpoint
from mindllm.train.checkpoint.manifest import MANIFEST, OPTIMIZER, STATE, WEIGHTS, FileEntry, Manifest
from mindllm.train.checkpoint.names import Entry, entries, entry_of, hidden_path, leftovers
from mindllm.train.checkpoint.parts import Part, without_copies, write_parts
from mindllm.train.checkpoint.tensors import HashingWriter, TensorSource, payload_bytes, write_tensors

logger = logging.getLogger(__name__)

FILE_NAMES = {WEIGHTS: "model.safetensors", OPTIMIZER: "optimizer.safetensors", STATE: "state.json"}
Content = tuple[str, str, Callable[[HashingWriter], None]]
"""A file of a checkpoint: name, role, and what writes it."""


class CheckpointNotSavedError(RuntimeError):
    """A checkpoint could not be written (a full disk, most often). Nothing of it is left, older ones are untouched: go on."""


class CheckpointStore:
    """Saves to and loads from ``{directory}/{prefix}-{step}/``. One process writes, any number may read.

    A writer calls ``recover`` when it starts, ``resume`` if it continues, ``supersede_after`` before its first step, then
    ``save``. The newest ``keep_checkpoint_max`` checkpoints are kept.
    """

    def __init__(self, directory: Path | str, prefix: str = "llm", keep_checkpoint_max: int = 5) -> None:
        if keep_checkpoint_max < 1:
            raise ValueError(f"keep_checkpoint_max must be at least 1, got {keep_checkpoint_max}")
        self.directory = Path(directory)
        self.prefix = prefix
        self.keep_checkpoint_max = keep_checkpoint_max

    def recover(self) -> None:
        """Cleans up after processes that died: ends deletions, drops half-saved checkpoints, undoes half-done replacements."""
        for leftover in leftovers(self.directory):
            if not self._is_ours(entry_of(leftover.announced)):
                continue
            if leftover.purpose == "replaced" and not leftover.announced.exists():
                leftover.path.rename(leftover.announced)
            else:
                shutil.rmtree(leftover.path)

    def supersede_after(self, step: int) -> list[Path]:
        """Sets aside the checkpoints after ``step``, where training goes on (0: from the start); returns their new paths.

        They belong to a run that is abandoned: the next resume must not pick one of them. They still load, by path, and give
        way to new checkpoints first.
        """
        own = self._entries()
        generation = 1 + max((entry.generation or 0 for entry in own), default=0)
        moved = []
        for entry in own:
            if entry.generation is None and entry.step > step:
                moved.append(entry.path.rename(entry.path.with_name(f"{entry.path.name}.superseded-{generation}")))
        if moved:
            sync_directory(self.directory)
        return moved

    def save(
        self,
        step: int,
        weights: Mapping[str, TensorSource],
        optimizer: Mapping[str, TensorSource],
        state: dict[str, Any],
    ) -> Path:
        """Saves a checkpoint, then deletes the oldest beyond ``keep_checkpoint_max``. An existing one of ``step`` is replaced.

        Arguments:
            weights, optimizer: arrays by name, or objects that become arrays when their turn to be written comes.
            state: what JSON holds exactly (loss scale, position of the sampler, random state, digest of the configuration).

        Raises:
            CheckpointNotSavedError: the disk is full or refuses; training can go on.
            TypeError: a dtype that cannot be saved, or ``state`` is not what JSON gives back.
        """
        contents: list[Content] = [
            (FILE_NAMES[WEIGHTS], WEIGHTS, lambda writer: write_tensors(writer, weights)),
            (FILE_NAMES[OPTIMIZER], OPTIMIZER, lambda writer: write_tensors(writer, optimizer)),
            (FILE_NAMES[STATE], STATE, _state_writer(state)),
        ]
        return self._save(step, contents, payload_bytes(weights) + payload_bytes(optimizer))

    def save_parts(
        self,
        step: int,
        weights: Sequence[Mapping[str, Part]],
        optimizer: Sequence[Mapping[str, Part]],
        state: dict[str, Any],
    ) -> Path:
        """As :meth:`save`, from the parts that ranks keep, one file for each rank; it loads under any other layout.

        Arguments:
            weights, optimizer: by rank. A part that several ranks have is written once.
        """
        contents: list[Content] = [
            *_part_contents(WEIGHTS, weights),
            *_part_contents(OPTIMIZER, optimizer),
            (FILE_NAMES[STATE], STATE, _state_writer(state)),
        ]
        return self._save(
            step, contents, sum(part.value.nbytes for rank in (*weights, *optimizer) for part in rank.values())
        )

    def _save(self, step: int, contents: Sequence[Content], size: int) -> Path:
        final = self.directory / f"{self.prefix}-{step}"
        try:
            _make_directory(self.directory)
            self._refuse_if_full(size)
            self._write_and_publish(final, step, contents)
        except OSError as error:
            raise CheckpointNotSavedError(self._not_saved(final, error)) from error
        self._delete_oldest(final)
        return final

    def newest(self) -> Path | None:
        """Returns the announced checkpoint of the highest step, good or not; ``None`` when there is none."""
        current = self._current()
        return current[-1].path if current else None

    def latest_good(self) -> Path | None:
        """Returns the newest checkpoint whose every byte is verified, or ``None``."""
        return next((entry.path for entry in reversed(self._current()) if is_good(entry.path)), None)

    def resume(self, resume_training: bool | str) -> Checkpoint:
        """Loads what the key ``resume_training`` names: ``True`` is the newest checkpoint, a string the path of one.

        Raises:
            UserError: there is none, or it is damaged. It never falls back to another one by itself.
        """
        if resume_training is not True:
            return load_checkpoint(str(resume_training))
        newest = self.newest()
        if newest is None:
            others = ", ".join(entry.path.name for entry in entries(self.directory))
            found = f"; found there: {others}" if others else ""
            raise UserError(
                f"resume_training=True, but {self.directory} holds no checkpoint {self.prefix}-<step>{found}; "
                f"start without resume_training, or give it the path of a checkpoint"
            )
        return load_checkpoint(newest)

    def _is_ours(self, entry: Entry | None) -> bool:
        return entry is not None and entry.prefix == self.prefix

    def _entries(self) -> list[Entry]:
        return [entry for entry in entries(self.directory) if self._is_ours(entry)]

    def _current(self) -> list[Entry]:
        return [entry for entry in self._entries() if entry.generation is None]

    def _write_and_publish(self, final: Path, step: int, contents: Sequence[Content]) -> None:
        temporary = hidden_path(final, "saving")
        try:
            temporary.mkdir()
            files = tuple(_write_file(temporary / name, role, write) for name, role, write in contents)
            _write_file(temporary / MANIFEST, "manifest", lambda writer: writer.write(Manifest(step, files).render()))
            sync_directory(temporary)
            _publish(temporary, final)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def _refuse_if_full(self, needed: int) -> None:
        free = shutil.disk_usage(self.directory).free
        if free < needed:
            raise OSError(f"it needs {needed / 1e6:.1f} MB and {free / 1e6:.1f} MB are free")

    def _not_saved(self, final: Path, error: OSError) -> str:
        newest = self.newest()
        kept = f"the newest checkpoint is {newest}" if newest else "there is no checkpoint yet"
        return f"{final} was not saved: {error.strerror or error}. Nothing of it is left; {kept}. Free some space"

    def _delete_oldest(self, just_saved: Path) -> None:
        others = [entry.path for entry in self._entries() if entry.path != just_saved]
        for path in others[: max(0, len(others) + 1 - self.keep_checkpoint_max)]:
            try:
                _delete(path)
            except OSError as error:
                logger.warning("the old checkpoint %s could not be deleted: %s", path, error)


def _part_contents(role: str, ranks: Sequence[Mapping[str, Part]]) -> Iterator[Content]:
    """The files of all ranks that have something to write."""
    for rank, parts in enumerate(without_copies(ranks)):
        if parts:
            name = Path(FILE_NAMES[role])
            file = f"{name.stem}-{rank:05d}-of-{len(ranks):05d}{name.suffix}"
            yield file, role, partial(write_parts, parts)


def _state_writer(state: dict[str, Any]) -> Callable[[HashingWriter], None]:
    text = json.dumps(state, indent=2, allow_nan=False)
    if json.loads(text) != state:
        raise TypeError("state must be what JSON gives back: lists instead of tuples, strings as keys")
    return lambda writer: writer.write(text.encode() + b"\n")


def _write_file(path: Path, role: str, write: Callable[[HashingWriter], None]) -> FileEntry:
    with open(path, "xb") as file:
        writer = HashingWriter(file)
        write(writer)
        file.flush()
        os.fsync(file.fileno())
    return FileEntry(path.name, role, writer.size, writer.sha256)


def _publish(temporary: Path, final: Path) -> None:
    """Renames ``temporary`` to ``final`` durably. A predecessor steps aside under a name that ``recover`` puts back."""
    replaced = hidden_path(final, "replaced")
    try:
        if final.exists():
            final.rename(replaced)
        temporary.rename(final)
    except BaseException:
        if replaced.exists() and not final.exists():
            replaced.rename(final)
        raise
    sync_directory(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _delete(path: Path) -> None:
    """Deletes a checkpoint so that it is either whole or no longer visible, whenever the process or the machine stops."""
    doomed = path.rename(hidden_path(path, "deleting"))
    sync_directory(path.parent)  # before the first file goes: a lost rename would leave a checkpoint with holes
    shutil.rmtree(doomed)


def _make_directory(directory: Path) -> None:
    """Creates ``directory`` with its parents; each new name is on the disk before anything is announced inside."""
    if directory.is_dir():
        return
    _make_directory(directory.parent)
    directory.mkdir(exist_ok=True)
    sync_directory(directory.parent)
