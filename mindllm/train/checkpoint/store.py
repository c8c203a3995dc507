"""The checkpoints of one run. A crash at any moment loses none that was published; the newest few are retained.

A checkpoint is written under a hidden name, every file flushed to the disk, the manifest last, and becomes visible by one
rename (the pattern of Pillai et al., "All File Systems Are Not Created Equal", OSDI 2014). ``save`` returns only after that
rename is on the disk: from then on the checkpoint is published. Deletion also consists of steps that are each safe against a
crash.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from mindllm.config import RunConfig
from mindllm.config.callbacks import CheckpointMonitorConfig
from mindllm.errors import UserError
from mindllm.files import sync_directory
from mindllm.train.checkpoint.joint import SINGLE_RANK, Peers, abandon, await_outcome, check_abandoned, collect, report
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
from mindllm.train.checkpoint.names import Entry, entries, hidden_path, leftovers, parse_entry
from mindllm.train.checkpoint.parts import RankTensors, complete_tensors, drop_replicas, split_parts, write_parts
from mindllm.train.checkpoint.tensors import HashingWriter, payload_bytes, write_tensors

logger = logging.getLogger(__name__)

AUTO = "auto"
FP32_BYTES, MOMENTS_BYTES = 4, 8
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
FILE_NAMES = {WEIGHTS: "model.safetensors", OPTIMIZER: "optimizer.safetensors", STATE: "state.json"}


def write_file(path: Path, role: str, write: Callable[[HashingWriter], None]) -> FileEntry:
    """Create a file with ``write``, flush it to the disk, and return its entry in the manifest."""
    with open(path, "xb") as file:
        writer = HashingWriter(file)
        write(writer)
        file.flush()
        os.fsync(file.fileno())
    return FileEntry(path.name, role, writer.size, writer.sha256)


def publish(temporary: Path, final: Path) -> None:
    """Rename ``temporary`` to ``final`` durably. A predecessor is renamed so that ``recover`` can restore it."""
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
    """Delete a checkpoint so that it is either complete or invisible if the process or the machine stops."""
    doomed = path.rename(hidden_path(path, "deleting"))
    sync_directory(path.parent)  # before the first file is removed: a lost rename would leave an incomplete checkpoint
    shutil.rmtree(doomed)


def make_directory(directory: Path) -> None:
    """Create ``directory`` and its parents, with each new name on the disk before a checkpoint is published in it."""
    if directory.is_dir():
        return
    make_directory(directory.parent)
    directory.mkdir(exist_ok=True)
    sync_directory(directory.parent)


def checkpoint_bytes(config: RunConfig) -> int:
    """Estimate the bytes of one checkpoint: trained weights and their optimizer state."""
    model = config.model.config
    total = (FP32_BYTES + MOMENTS_BYTES) * model.architecture.trained_parameter_count()
    if model.has_half_parameters:
        shapes = model.architecture.trained_shapes()
        halves = sum(math.prod(shape) for name, shape in shapes.items() if model.parameter_type(name) != "float32")
        total += (FP32_BYTES // 2 if config.optimizer.master_weights else -FP32_BYTES // 2) * halves
    return total


def max_checkpoints(config: RunConfig) -> int:
    """Return the maximum number of retained checkpoints, 1 if the run does not set it."""
    limits = [item.keep_checkpoint_max for item in config.callbacks if isinstance(item, CheckpointMonitorConfig)]
    return max(limits, default=1)


class Content(NamedTuple):
    """A file of a checkpoint: name, role, the function that writes it, and the bytes of its values."""

    name: str
    role: str
    write: Callable[[HashingWriter], None]
    size: int = 0


class CheckpointNotSavedError(RuntimeError):
    """A checkpoint could not be written, usually because of a full disk. Older ones are intact; training can continue."""


class CheckpointStore:
    """Checkpoints in ``{directory}/{prefix}-{step}/``, written by the processes of one run and read by any number.

    A run calls ``recover`` when it starts, ``resume`` if it continues, ``supersede_after`` before its first step, then
    ``save``. The newest ``keep_checkpoint_max`` checkpoints are retained.

    Args:
        peers: the processes that write together. Only the first one cleans up, renames and deletes.
        remove_redundancy: whether equal parts of several ranks are written by the first of them only.
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
        self._abandoned: Path | None = None

    def recover(self) -> None:
        """Clean up after processes that died: finish deletions, remove partial saves, undo partial replacements."""
        for leftover in leftovers(self.directory) if self.peers.is_first else ():
            entry = parse_entry(leftover.published)
            if entry is None or entry.prefix != self.prefix:
                continue
            if leftover.purpose == "replaced" and not leftover.published.exists():
                leftover.path.rename(leftover.published)
            else:
                shutil.rmtree(leftover.path)

    def supersede_after(self, step: int) -> list[Path]:
        """Rename the checkpoints after ``step``, where training continues (0: from the start), and return their new paths.

        They belong to an abandoned run, which the next resume must not continue. They can still be loaded by path, and are
        deleted before others.
        """
        if not self.peers.is_first:
            return []
        existing = self._entries()
        generation = 1 + max((entry.generation or 0 for entry in existing), default=0)
        moved = []
        for entry in existing:
            if entry.generation is None and entry.step > step:
                moved.append(entry.path.rename(entry.path.with_name(f"{entry.path.name}.superseded-{generation}")))
        if moved:
            sync_directory(self.directory)
        return moved

    def save(self, step: int, ranks: Mapping[int, RankTensors], state: dict[str, Any]) -> Path:
        """Save a checkpoint, then delete the oldest beyond ``keep_checkpoint_max``. An existing one of ``step`` is replaced.

        Every process of the run calls it for the same steps in the same order. It returns when the checkpoint is visible.

        Arguments:
            ranks: the tensors of this process's ranks: one rank in a process per rank, or all of them. Values become arrays
                when they are written. Equal parts of several ranks are written once, unless ``remove_redundancy`` is off.
                The files can be loaded under any other layout.
            state: JSON content (loss scale, position of the sampler, random state, digest of the configuration). Only the
                first process writes it.

        Raises:
            CheckpointNotSavedError: the disk is full or fails, or another process could not write. Training can continue.
            TypeError: a dtype is unsupported, or JSON does not reproduce ``state``.
        """
        total = max(self.peers.count, *(rank + 1 for rank in ranks)) if ranks else self.peers.count
        contents = list(self._contents(ranks, total))
        if self.peers.is_first:
            text = json.dumps(state, indent=2, allow_nan=False)
            if json.loads(text) != state:
                raise TypeError("state must be reproducible by JSON: lists instead of tuples, strings as keys")
            contents.append(Content(FILE_NAMES[STATE], STATE, lambda writer: writer.write(text.encode() + b"\n")))
        final = self.directory / f"{self.prefix}-{step}"
        self._attempts += 1
        try:
            make_directory(self.directory)
            self._write_and_publish(final, step, contents)
        except OSError as error:
            newest = self.newest()
            newest_text = f"the newest checkpoint is {newest}" if newest else "no checkpoint exists yet"
            advice = ". Free some space" if error.errno in FULL else ""
            raise CheckpointNotSavedError(
                f"{final} was not saved: {error.strerror or error}. Nothing of it is left; {newest_text}{advice}"
            ) from error
        if self.peers.is_first:
            self._delete_oldest(final)
        return final

    def _contents(self, ranks: Mapping[int, RankTensors], total: int) -> Iterator[Content]:
        """Yield the files of tensors that this process writes."""
        roles = {
            WEIGHTS: {rank: tensors.weights for rank, tensors in ranks.items()},
            OPTIMIZER: {rank: tensors.optimizer for rank, tensors in ranks.items()},
        }
        for role, by_rank in roles.items():
            if total == 1:
                complete = complete_tensors(by_rank.get(0, {}))
                if complete is not None:
                    write = partial(write_tensors, tensors=complete)
                    yield Content(FILE_NAMES[role], role, write, payload_bytes(complete))
                    continue
            parts = {rank: split_parts(tensors, rank) for rank, tensors in by_rank.items()}
            for rank, chosen in (drop_replicas(parts) if self.remove_redundancy else parts).items():
                if chosen:
                    name = Path(FILE_NAMES[role])
                    file = f"{name.stem}-{rank:05d}-of-{total:05d}{name.suffix}"
                    size = payload_bytes({name: part.value for name, part in chosen.items()})
                    yield Content(file, role, partial(write_parts, chosen), size)

    def newest(self) -> Path | None:
        """Return the published checkpoint of the highest step, or None. It is not verified."""
        current = self._current()
        return current[-1].path if current else None

    def latest_good(self) -> Path | None:
        """Return the newest checkpoint that passes verification, or None."""
        return next((entry.path for entry in reversed(self._current()) if is_good(entry.path)), None)

    def resume(self, resume_training: bool | str) -> Checkpoint | None:
        """Load the checkpoint that the key ``resume_training`` names. Every process of the run calls it.

        ``True`` is the newest checkpoint, or with a warning the newest good one if that is damaged. ``"auto"`` additionally
        returns None if there is no checkpoint, so that the run begins. Another string is the path of a checkpoint.

        Raises:
            UserError: no checkpoint exists, or all are damaged.
        """
        if resume_training not in (True, AUTO):
            return load_checkpoint(str(resume_training), peers=self.peers)
        candidates = [entry.path for entry in reversed(self._current())]
        if not candidates and resume_training == AUTO:
            return None
        if not candidates:
            names = ", ".join(entry.path.name for entry in entries(self.directory))
            raise UserError(
                f"resume_training=True, but {self.directory} has no checkpoint {self.prefix}-<step>"
                f"{f'; it has {names}' if names else ''}; start without resume_training, write resume_training=auto, or pass the "
                "path of a checkpoint"
            )
        damages = []
        for path in candidates:
            try:
                return load_checkpoint(path, peers=self.peers, offers=False)
            except DamagedCheckpointError as damage:
                damages.append(damage)
                logger.warning("%s; trying the previous checkpoint", damage)
        raise UserError(f"{damages[0]}\n{self.directory} has no other good checkpoint; start without resume_training")

    def _entries(self) -> list[Entry]:
        return [entry for entry in entries(self.directory) if entry.prefix == self.prefix]

    def _current(self) -> list[Entry]:
        return [entry for entry in self._entries() if entry.generation is None]

    def _write_and_publish(self, final: Path, step: int, contents: Sequence[Content]) -> None:
        if self.peers.count > 1:
            self._write_jointly(final, step, contents)
            return
        temporary = hidden_path(final, "saving")
        try:
            temporary.mkdir()
            self._publish(temporary, final, step, self._write(temporary, contents))
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def _write_jointly(self, final: Path, step: int, contents: Sequence[Content]) -> None:
        """Write the files of one of several processes. The first one publishes after the others have reported."""
        temporary = self.peers.hidden(final, self._attempts)
        try:
            if self._abandoned is not None:
                shutil.rmtree(self._abandoned, ignore_errors=True)
            temporary.mkdir(exist_ok=True)
            check_abandoned(temporary)
            files = self._write(temporary, contents)
            if self.peers.is_first:
                self._publish(temporary, final, step, (*files, *collect(temporary, self.peers)))
            else:
                sync_directory(temporary)
                report(temporary, self.peers.rank, files)
                await_outcome(temporary, final, files, self.peers)
        except BaseException as error:
            if self.peers.is_first:
                abandon(temporary)
                self._abandoned = temporary  # late ranks need it until the next save
            else:
                with suppress(OSError):
                    report(temporary, self.peers.rank, problem=str(error) or type(error).__name__)
                if isinstance(error, FileNotFoundError):
                    check_abandoned(temporary)  # the first rank has removed this rank's file
            raise

    def _write(self, temporary: Path, contents: Sequence[Content]) -> tuple[FileEntry, ...]:
        needed, free = sum(content.size for content in contents), shutil.disk_usage(self.directory).free
        if free < needed:
            figures = f"it needs {needed / 1e6:.1f} MB and {free / 1e6:.1f} MB are free"
            raise OSError(errno.ENOSPC, f"{figures}: {(needed - free) / 1e6:.1f} MB are missing")
        return tuple(write_file(temporary / item.name, item.role, item.write) for item in contents)

    def _publish(self, temporary: Path, final: Path, step: int, files: tuple[FileEntry, ...]) -> None:
        write_file(temporary / MANIFEST, "manifest", lambda writer: writer.write(Manifest(step, files).render()))
        sync_directory(temporary)
        publish(temporary, final)

    def _delete_oldest(self, just_saved: Path) -> None:
        earlier = [entry.path for entry in self._entries() if entry.path != just_saved]
        for path in earlier[: max(0, len(earlier) + 1 - self.keep_checkpoint_max)]:
            try:
                delete(path)
            except OSError as error:
                logger.warning("the old checkpoint %s could not be deleted: %s", path, error)


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint on the disk: seconds that training was blocked, and total seconds of writing."""

    step: int
    path: Path
    blocked: float
    written: float


class SavingThread:
    """Saves checkpoints in a thread during training, one after another. It needs host memory for a copy of the tensors."""

    def __init__(self, store: CheckpointStore) -> None:
        self.store = store
        self._pool = ThreadPoolExecutor(1, "checkpoint")
        self._last: Future[SavedCheckpoint] | None = None

    def save(self, step: int, ranks: Mapping[int, RankTensors], state: dict[str, Any]) -> SavedCheckpoint | None:
        """Wait for the last checkpoint, copy ``ranks`` to the host and begin to write; return the last checkpoint.

        Raises:
            CheckpointNotSavedError: the last one could not be written; the new one has not been started.
        """
        start = time.perf_counter()
        last = self.finish()
        copies = {rank: tensors.on_host() for rank, tensors in ranks.items()}
        blocked = time.perf_counter() - start
        self._last = self._pool.submit(self._write, step, copies, state, blocked)
        return last

    def poll(self) -> SavedCheckpoint | None:
        """Return the checkpoint that has been completed since the last call. Raises like :meth:`finish`."""
        return self.finish() if self._last is not None and self._last.done() else None

    def finish(self) -> SavedCheckpoint | None:
        """Wait for the checkpoint in progress.

        Raises:
            CheckpointNotSavedError: it could not be written.
        """
        last, self._last = self._last, None
        return last.result() if last is not None else None

    def close(self) -> None:
        """Wait for the thread to end."""
        self._pool.shutdown(wait=True)

    def _write(
        self, step: int, ranks: Mapping[int, RankTensors], state: dict[str, Any], blocked: float
    ) -> SavedCheckpoint:
        start = time.perf_counter()
        path = self.store.save(step, ranks, state)
        return SavedCheckpoint(step, path, blocked, time.perf_counter() - start)
