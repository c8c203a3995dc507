"""Loads a checkpoint after checking every byte of it, or refuses it by name and offers the previous good one.

It says which architecture it holds.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from mindllm.config import ModelConfig
from mindllm.errors import UserError, nearest
from mindllm.families import with_file_names
from mindllm.files import unexpanded
from mindllm.outside import read_json
from mindllm.train.checkpoint.joint import SINGLE_RANK, Peers
from mindllm.train.checkpoint.manifest import (
    MANIFEST,
    OPTIMIZER,
    STATE,
    WEIGHTS,
    DamagedCheckpointError,
    Manifest,
    read_manifest,
    verify_files,
)
from mindllm.train.checkpoint.names import Entry, beside_missing, entries, entry_of
from mindllm.train.checkpoint.parts import holds_parts, read_parts
from mindllm.train.checkpoint.tensors import TensorSource, read_slices, read_tensors

Expected = Mapping[str, tuple[tuple[int, ...], Any]]  # name: (shape, dtype)
MOST_NAMED = 10
SIMULATED = "simulated"  # a key of the state
BASE = "base"  # a key of the state
FLOATING = ("float32", "float16", "bfloat16", "float64")


def model_of(checkpoint: Checkpoint) -> ModelConfig:
    """The architecture that a checkpoint says it holds; raises UserError when it says none."""
    try:
        return with_file_names(ModelConfig.model_validate(checkpoint.state["identity"]["model"]["config"]))
    except (KeyError, TypeError, ValidationError):
        raise UserError(
            f"{checkpoint.path}: state.json does not say the architecture (identity.model.config)"
        ) from None


@dataclass(frozen=True)
class Base:
    """The frozen weights that a checkpoint leaves out: their path ("": drawn from the seed) and their fingerprint."""

    path: str
    fingerprint: str

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Base | None:
        """Return the base that the state of a checkpoint names, or None if the checkpoint holds all weights."""
        return cls(**state[BASE]) if state.get(BASE) else None


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint holds. Arrays that are views of its files keep them on the disk: drop them once copied."""

    path: Path
    step: int
    weights: dict[str, Any]
    optimizer: dict[str, Any]
    state: dict[str, Any]

    def slice(self, name: str, offsets: Sequence[int], shape: Sequence[int]) -> np.ndarray:
        """The block of ``shape`` that begins at ``offsets`` of weight or optimizer tensor ``name``; nothing else is read.

        Raises:
            UserError: the checkpoint has no such tensor, or no such block of it.
        """
        source = self.weights.get(name, self.optimizer.get(name))
        if source is None:
            raise UserError(f"{self.path} has no tensor {name}{nearest(name, [*self.weights, *self.optimizer])}")
        whole = tuple(source.shape)
        ends = [first + size for first, size in zip(offsets, shape, strict=True)]
        if len(ends) != len(whole) or min(offsets, default=0) < 0 or any(map(operator.gt, ends, whole)):
            raise UserError(
                f"{self.path}: tensor {name} of shape {list(whole)} has no block {list(shape)} at {list(offsets)}"
            )
        return read_slices(source, tuple(map(slice, offsets, ends)))

    @property
    def is_simulated(self) -> bool:
        """Whether a simulated run has written it: it holds what a single rank keeps, and nothing that was computed."""
        return bool(self.state.get(SIMULATED))

    def refuse_simulated(self) -> None:
        """Raises a UserError where nobody has trained what it holds."""
        if self.is_simulated:
            raise UserError(
                f"{self.path} was written by a simulated run, which computes nothing; give another checkpoint"
            )

    def require(self, weights: Expected, optimizer: Expected | None = None) -> None:
        """Checks names, shapes and dtypes against what the model (and its optimizer, if given) has.

        Raises:
            UserError: one message that names every missing, surplus and misshapen tensor, ten of each kind.
        """
        lines = differences("weights", self.weights, weights)
        if optimizer is not None:
            lines += differences("optimizer", self.optimizer, optimizer)
        if lines:
            raise UserError(
                f"{self.path} does not fit the model of this run:\n  "
                + "\n  ".join(lines)
                + "\ngive the model section it was trained with, or another checkpoint"
            )


def load_checkpoint(
    path: Path | str,
    option: str = "--resume_training",
    with_optimizer: bool = True,
    read: Callable[[Path], Mapping[str, Any]] = read_tensors,
    peers: Peers = SINGLE_RANK,
    offers: bool = True,
) -> Checkpoint:
    """Loads the checkpoint directory ``path``; sizes and checksums of all files read are verified first.

    Several ``peers``, all of which call it, share the verification: each reads every ``peers.count``-th file for it. With
    ``offers`` the error of a damaged checkpoint names the previous good one, which is looked for.

    Without the optimizer (``with_optimizer=False``) its file is neither checked nor needed and ``optimizer`` is empty.
    ``read`` makes tensors of a file: ``read_tensors`` arrays, ``stored_tensors`` what becomes an array when it is needed. Of a
    checkpoint that ranks wrote in parts, whatever their layout was, every tensor is a ``PartedTensor``, which is whole again
    when it is needed.

    Raises:
        UserError: there is no checkpoint, or it is damaged; names the file and the previous good checkpoint, to be given as
            ``option``.
    """
    path = Path(path)
    roles = (WEIGHTS, STATE, OPTIMIZER) if with_optimizer else (WEIGHTS, STATE)
    manifest = verify_checkpoint(path, option, roles, peers, offers)
    state: dict[str, Any] = {}
    for name in _names(manifest, STATE):
        state |= _state(path / name)
    one_rank = bool(state.get(SIMULATED))
    optimizer = _tensors(path, manifest, OPTIMIZER, read, one_rank) if with_optimizer else {}
    return Checkpoint(path, manifest.step, _tensors(path, manifest, WEIGHTS, read, one_rank), optimizer, state)


def _state(path: Path) -> dict[str, Any]:
    try:
        found = read_json(path)
    except OSError as error:
        raise DamagedCheckpointError(path, f"cannot be read ({error.strerror})") from None
    if not isinstance(found, dict):
        raise DamagedCheckpointError(path, "is foreign: it holds no object of keys and values")
    return found


def verify_checkpoint(
    path: Path | str,
    option: str = "--resume_training",
    roles: tuple[str, ...] = (WEIGHTS, STATE, OPTIMIZER),
    peers: Peers = SINGLE_RANK,
    offers: bool = True,
) -> Manifest:
    """Checks the files of ``roles`` and returns the manifest; errors as in ``load_checkpoint``."""
    path = Path(path)
    found, damaged, refused = None, None, None
    try:
        _refuse_other_paths(path, option)
        found = _verified(path, roles, peers)
    except DamagedCheckpointError as damage:
        damaged = damage
    except UserError as error:
        refused = error
    if not peers.agree(refused is None):
        raise refused or UserError(f"{option}={path} is seen by this rank and not by another one; its log says more")
    if not peers.agree(damaged is None):
        damaged = damaged or DamagedCheckpointError(
            path, "is damaged, as another rank has found; its log names the file"
        )
        offer = f"\n{_offer(path, option, roles, peers.count == 1)}" if offers else ""
        raise DamagedCheckpointError(damaged.path, f"{damaged.problem}{offer}") from None
    assert found is not None
    return found


def is_good(path: Path, roles: tuple[str, ...] = (WEIGHTS, STATE, OPTIMIZER)) -> bool:
    """Returns whether the checkpoint at ``path`` would load."""
    try:
        _verified(path, roles)
    except DamagedCheckpointError:
        return False
    return True


def _verified(path: Path, roles: tuple[str, ...], peers: Peers = SINGLE_RANK) -> Manifest:
    manifest = read_manifest(path)
    entry = entry_of(path)
    if entry and entry.step != manifest.step:
        problem = (
            f"is that of step {manifest.step}: the directory was renamed, or files were copied between checkpoints"
        )
        raise DamagedCheckpointError(path / MANIFEST, problem)
    verify_files(path, manifest, roles, peers.rank, peers.count)
    return manifest


def _refuse_other_paths(path: Path, option: str) -> None:
    """Names the usual slips: a path that is not there, one file of a checkpoint, the directory above checkpoints."""
    if path.is_file():
        holder = f": give {option}={path.parent}" if (path.parent / MANIFEST).is_file() else ""
        raise UserError(f"{option}={path} is a file; a checkpoint is a directory{holder}")
    if not path.is_dir():
        raise UserError(f"{option}={path} does not exist{beside_missing(path)}{unexpanded(path)}")
    inside = entries(path) or entries(path / "checkpoint")
    if inside and not (path / MANIFEST).exists():
        raise UserError(f"{option}={path} holds checkpoints; give one of them: {option}={inside[-1].path}")


def _offer(damaged: Path, option: str, roles: tuple[str, ...], verified: bool) -> str:
    """Names the previous good checkpoint; of many ranks none is to read whole checkpoints, so theirs is not ``verified``."""
    others = (entry.path for entry in _alternatives(damaged))
    good = next((path for path in others if not verified or is_good(path, roles)), None)
    if good is None:
        without = f"; start without {option}" if option.startswith("--") else ""
        return f"there is no other good checkpoint in {damaged.parent}{without}"
    verb = "resume with" if option == "--resume_training" else "give"
    return f"the previous {'good ' if verified else ''}checkpoint is there: {verb} {option}={good}"


def _alternatives(damaged: Path) -> list[Entry]:
    """The other checkpoints of the same prefix, best offer first: the latest one before the damaged, then later ones."""
    own = entry_of(damaged)
    others = [entry for entry in entries(damaged.parent) if entry.path.name != damaged.name]
    if own is None:
        return others[::-1]
    same = [entry for entry in others if entry.prefix == own.prefix]
    before = [entry for entry in same if entry.age < own.age]
    return before[::-1] + [entry for entry in same if entry.age > own.age]


def _names(manifest: Manifest, role: str) -> list[str]:
    return [entry.name for entry in manifest.files if entry.role == role]


def _tensors(
    path: Path, manifest: Manifest, role: str, read: Callable[[Path], Mapping[str, Any]], one_rank: bool
) -> dict[str, Any]:
    files = [path / name for name in _names(manifest, role)]
    if any(map(holds_parts, files)):
        try:
            return dict(read_parts(files, incomplete=one_rank))
        except ValueError as error:
            raise DamagedCheckpointError(path, f"is not whole: {error}") from None
    tensors: dict[str, Any] = {}
    for file in files:
        tensors |= read(file)
    return tensors


def differences(role: str, found: Mapping[str, TensorSource], expected: Expected) -> list[str]:
    """One line for the missing, the surplus and the misshapen tensors each: names with dtypes and shapes."""
    wanted = {name: _signature(shape, dtype) for name, (shape, dtype) in expected.items()}
    present = {name: _signature(array.shape, array.dtype) for name, array in found.items()}
    kinds = {
        "missing": [f"{name} {wanted[name]}" for name in wanted if name not in present],
        "surplus": [f"{name} {present[name]}" for name in present if name not in wanted],
        "misshapen": [
            f"{name} {present[name]} instead of {wanted[name]}"
            for name in wanted
            if name in present and present[name] != wanted[name]
        ],
    }
    return [f"{role}, {kind} ({len(items)}): {_capped(items)}" for kind, items in kinds.items() if items]


def floating_dtype(found: Mapping[str, TensorSource], name: str) -> np.dtype:
    """The dtype that a weight is expected to have: its own, if its values are numbers with a fraction."""
    here = name in found and found[name].dtype.name in FLOATING
    return found[name].dtype if here else np.dtype(np.float32)


def _signature(shape: tuple[int, ...], dtype: Any) -> str:
    return f"{np.dtype(dtype).name}{list(shape)}"


def _capped(items: list[str]) -> str:
    more = len(items) - MOST_NAMED
    return ", ".join(items[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
