"""The checkpoints of one run: saved so that a crash at any moment loses none that was announced, the newest few kept.

A checkpoint is written under a hidden name, every file flushed to the disk, the manifest last, and becomes visible by one
rename (the pattern of Pillai et al., "All File Systems Are Not Created Equal", OSDI 2014). ``save`` returns only after that
rename is on the disk: from then on the checkpoint is announced.

A checkpoint comes and goes on the disk in steps, each safe against a crash after it.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from mindllm.errors import UserError
from mindllm.files import sync_directory
from mindllm.train.checkpoint.joint import SINGLE_RANK, Peers, await_outcome, collect, give_up, refuse_given_up, report
from mindllm.train.checkpoint.loading import Checkpoint, is_good, load_checkpoint
from mindllm.train.checkpoint.manifest import (
    MANIFEST,
    OPTIMIZER,
    STATE,
    WEIGHTS,
    DamagedCheckpointError,
    FileEntry,
    Manifest,
)
from mindllm.train.checkpoint.names import Entry, entries, entry_of, hidden_path, leftovers
from mindllm.train.checkpoint.parts import RankTensors, as_parts, whole_tensors, without_copies, write_parts
from mindllm.train.checkpoint.tensors import HashingWriter, payload_bytes, write_tensors

logger = logging.getLogger(__name__)

AUTO = "auto"
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
FILE_NAMES = {WEIGHTS: "model.safetensors", OPTIMIZER: "optimizer.safetensors", STATE: "state.json"}


def write_file(path: Path, role: str, write: Callable[[HashingWriter], None]) -> FileEntry:
    """Has ``write`` write a new file, flushed to the disk; returns its entry in the manifest."""
    with open(path, "xb") as file:
        writer = HashingWriter(file)
        write(writer)
        file.flush()
        os.fsync(file.fileno())
    return FileEntry(path.name, role, writer.size, writer.sha256)


def publish(temporary: Path, final: Path) -> None:
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


def delete(path: Path) -> None:
    """Deletes a checkpoint so that it is either whole or no longer visible, whenever the process or the machine stops."""
    doomed = path.rename(hidden_path(path, "deleting"))
    sync_directory(path.parent)  # before the first file goes: a lost rename would leave a checkpoint with holes
    shutil.rmtree(doomed)


def make_directory(directory: Path) -> None:
    """Creates ``directory`` with its parents; each new name is on the disk before anything is announced inside."""
    if directory.is_dir():
        return
    make_directory(directory.parent)
    directory.mkdir(exist_ok=True)
    sync_directory(directory.parent)


class Content(NamedTuple):
    """A file of a checkpoint: name, role, what writes it, and the bytes its values take."""

    name: str
    role: str
    write: Callable[[HashingWriter], None]
    size: int = 0


class CheckpointNotSavedError(RuntimeError):
    """A checkpoint could not be written (a full disk, most often). Nothing of it is left, older ones are untouched: go on."""


class CheckpointStore:
    """Saves to and loads from ``{directory}/{prefix}-{step}/``. The processes of one run write, any number may read.

    A run calls ``recover`` when it starts, ``resume`` if it continues, ``supersede_after`` before its first step, then
    ``save``. The newest ``keep_checkpoint_max`` checkpoints are kept.

    Args:
        peers: the processes that write together; the first of them alone cleans up, sets aside and deletes.
        remove_redundancy: whether a part that several ranks keep is written by the first of them only.
    """

    def __init__(
        self,
        directory: Path | str,
        prefix: str = "llm",
        keep_checkpoint_max: int = 5,
        peers: Peers = SINGLE_RANK,
        remove_redundancy: bool = True,
    ) -> None:
        if keep_checkpoint_max < 1:
            raise ValueError(f"keep_checkpoint_max must be at least 1, got {keep_checkpoint_max}")
        self.directory = Path(directory)
        self.prefix = prefix
        self.keep_checkpoint_max = keep_checkpoint_max
        self.peers = peers
        self.remove_redundancy = remove_redundancy
        self._attempts = 0
        self._given_up: Path | None = None

    def recover(self) -> None:
        """Cleans up after processes that died: ends deletions, drops half-saved checkpoints, undoes half-done replacements."""
        for leftover in leftovers(self.directory) if self.peers.is_first else ():
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
        if not self.peers.is_first:
            return []
        own = self._entries()
        generation = 1 + max((entry.generation or 0 for entry in own), default=0)
        moved = []
        for entry in own:
            if entry.generation is None and entry.step > step:
                moved.append(entry.path.rename(entry.path.with_name(f"{entry.path.name}.superseded-{generation}")))
        if moved:
            sync_directory(self.directory)
        return moved

    def save(self, step: int, held: Mapping[int, RankTensors], state: dict[str, Any]) -> Path:
        """Saves a checkpoint, then deletes the oldest beyond ``keep_checkpoint_max``. An existing one of ``step`` is replaced.

        Every process of the run calls it for the same steps, in the same order, and returns when the checkpoint is visible.

        Arguments:
            held: what the ranks of this process keep, by rank: one in a process per rank, all of them where one process
                executes all. Values become arrays when their turn to be written comes. A part that several ranks keep is
                written once, unless ``remove_redundancy`` is off; files load under any other layout.
            state: what JSON holds exactly (loss scale, position of the sampler, random state, digest of the configuration);
                the first process's is written.

        Raises:
            CheckpointNotSavedError: the disk is full or refuses, or another process could not write; training can go on.
            TypeError: a dtype that cannot be saved, or ``state`` is not what JSON gives back.
        """
        total = max(self.peers.count, *(rank + 1 for rank in held)) if held else self.peers.count
        contents = list(self._contents(held, total))
        if self.peers.is_first:
            contents.append(Content(FILE_NAMES[STATE], STATE, _state_writer(state)))
        final = self.directory / f"{self.prefix}-{step}"
        self._attempts += 1
        try:
            make_directory(self.directory)
            self._write_and_publish(final, step, contents)
        except OSError as error:
            raise CheckpointNotSavedError(self._not_saved(final, error)) from error
        if self.peers.is_first:
            self._delete_oldest(final)
        return final

    def _contents(self, held: Mapping[int, RankTensors], total: int) -> Iterator[Content]:
        """The files of tensors that this process writes."""
        roles = {
            WEIGHTS: {rank: tensors.weights for rank, tensors in held.items()},
            OPTIMIZER: {rank: tensors.optimizer for rank, tensors in held.items()},
        }
        for role, by_rank in roles.items():
            if total == 1:
                whole = whole_tensors(by_rank.get(0, {}))
                if whole is not None:
                    yield Content(FILE_NAMES[role], role, partial(write_tensors, tensors=whole), payload_bytes(whole))
                    continue
            parts = {rank: as_parts(tensors, rank) for rank, tensors in by_rank.items()}
            for rank, chosen in (without_copies(parts) if self.remove_redundancy else parts).items():
                if chosen:
                    name = Path(FILE_NAMES[role])
                    file = f"{name.stem}-{rank:05d}-of-{total:05d}{name.suffix}"
                    size = payload_bytes({name: part.value for name, part in chosen.items()})
                    yield Content(file, role, partial(write_parts, chosen), size)

    def newest(self) -> Path | None:
        """Returns the announced checkpoint of the highest step, good or not; ``None`` when there is none."""
        current = self._current()
        return current[-1].path if current else None

    def latest_good(self) -> Path | None:
        """Returns the newest checkpoint whose every byte is verified, or ``None``."""
        return next((entry.path for entry in reversed(self._current()) if is_good(entry.path)), None)

    def resume(self, resume_training: bool | str) -> Checkpoint | None:
        """Loads what the key ``resume_training`` names; every process of the run calls it.

        ``True`` is the newest checkpoint, or, where that is damaged, the newest good one, with a warning; ``"auto"`` the same,
        or None where there is none: the run begins. Another string is the path of a checkpoint.

        Raises:
            UserError: there is none, or none that is good.
        """
        if resume_training not in (True, AUTO):
            return load_checkpoint(str(resume_training), peers=self.peers)
        candidates = [entry.path for entry in reversed(self._current())]
        if not candidates and resume_training == AUTO:
            return None
        if not candidates:
            raise UserError(self._nothing_to_resume())
        damages = []
        for path in candidates:
            try:
                return load_checkpoint(path, peers=self.peers, offers=False)
            except DamagedCheckpointError as damage:
                damages.append(damage)
                logger.warning("%s; the checkpoint before it is tried", damage)
        raise UserError(
            f"{damages[0]}\nthere is no other good checkpoint in {self.directory}; start without resume_training"
        )

    def _nothing_to_resume(self) -> str:
        others = ", ".join(entry.path.name for entry in entries(self.directory))
        found = f"; found there: {others}" if others else ""
        return (
            f"resume_training=True, but {self.directory} holds no checkpoint {self.prefix}-<step>{found}; start without "
            "resume_training, write resume_training=auto, or give it the path of a checkpoint"
        )

    def _is_ours(self, entry: Entry | None) -> bool:
        return entry is not None and entry.prefix == self.prefix

    def _entries(self) -> list[Entry]:
        return [entry for entry in entries(self.directory) if self._is_ours(entry)]

    def _current(self) -> list[Entry]:
        return [entry for entry in self._entries() if entry.generation is None]

    def _write_and_publish(self, final: Path, step: int, contents: Sequence[Content]) -> None:
        if self.peers.count > 1:
            self._write_together(final, step, contents)
            return
        temporary = hidden_path(final, "saving")
        try:
            temporary.mkdir()
            self._publish(temporary, final, step, self._write(temporary, contents))
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def _write_together(self, final: Path, step: int, contents: Sequence[Content]) -> None:
        """As one of several processes: the first one publishes when the others have reported."""
        temporary = self.peers.hidden(final, self._attempts)
        try:
            if self._given_up is not None:
                shutil.rmtree(self._given_up, ignore_errors=True)
            temporary.mkdir(exist_ok=True)
            refuse_given_up(temporary)
            files = self._write(temporary, contents)
            if self.peers.is_first:
                self._publish(temporary, final, step, (*files, *collect(temporary, self.peers)))
            else:
                sync_directory(temporary)
                report(temporary, self.peers.rank, files)
                await_outcome(temporary, final, files, self.peers)
        except BaseException as error:
            if self.peers.is_first:
                give_up(temporary)
                self._given_up = temporary  # left for ranks that come late, until the next save
            else:
                with suppress(OSError):
                    report(temporary, self.peers.rank, problem=str(error) or type(error).__name__)
                if isinstance(error, FileNotFoundError):
                    refuse_given_up(temporary)  # what this rank was writing has been removed
            raise

    def _write(self, temporary: Path, contents: Sequence[Content]) -> tuple[FileEntry, ...]:
        self._refuse_if_full(sum(content.size for content in contents))
        return tuple(write_file(temporary / item.name, item.role, item.write) for item in contents)

    def _publish(self, temporary: Path, final: Path, step: int, files: tuple[FileEntry, ...]) -> None:
        write_file(temporary / MANIFEST, "manifest", lambda writer: writer.write(Manifest(step, files).render()))
        sync_directory(temporary)
        publish(temporary, final)

    def _refuse_if_full(self, needed: int) -> None:
        free = shutil.disk_usage(self.directory).free
        if free < needed:
            figures = f"it needs {needed / 1e6:.1f} MB and {free / 1e6:.1f} MB are free"
            raise OSError(errno.ENOSPC, f"{figures}: {(needed - free) / 1e6:.1f} MB are missing")

    def _not_saved(self, final: Path, error: OSError) -> str:
        newest = self.newest()
        kept = f"the newest checkpoint is {newest}" if newest else "there is no checkpoint yet"
        advice = ". Free some space" if error.errno in FULL else ""
        return f"{final} was not saved: {error.strerror or error}. Nothing of it is left; {kept}{advice}"

    def _delete_oldest(self, just_saved: Path) -> None:
        others = [entry.path for entry in self._entries() if entry.path != just_saved]
        for path in others[: max(0, len(others) + 1 - self.keep_checkpoint_max)]:
            try:
                delete(path)
            except OSError as error:
                logger.warning("the old checkpoint %s could not be deleted: %s", path, error)


def _state_writer(state: dict[str, Any]) -> Callable[[HashingWriter], None]:
    text = json.dumps(state, indent=2, allow_nan=False)
    if json.loads(text) != state:
        raise TypeError("state must be what JSON gives back: lists instead of tuples, strings as keys")
    return lambda writer: writer.write(text.encode() + b"\n")
