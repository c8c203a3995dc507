"""Checkpoint loading: every byte is verified, and the error for a damaged checkpoint names the previous good one."""

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
from mindllm.train.checkpoint.names import entries, parse_entry, suggest_checkpoints
from mindllm.train.checkpoint.parts import has_parts, read_parts
from mindllm.train.checkpoint.tensors import TensorSource, read_slices, read_tensors

Expected = Mapping[str, tuple[tuple[int, ...], Any]]  # name: (shape, dtype)
ALL_ROLES = (WEIGHTS, STATE, OPTIMIZER)
MOST_LISTED = 10
SIMULATED = "simulated"  # a key of the state
BASE = "base"  # a key of the state
FLOATING = ("float32", "float16", "bfloat16", "float64")


@dataclass(frozen=True)
class Base:
    """The frozen weights that a checkpoint leaves out: their path ("": drawn from the seed) and their fingerprint."""

    path: str
    fingerprint: str

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Base | None:
        """Return the base that the state of a checkpoint names, or None if the checkpoint has all weights."""
        return cls(**state[BASE]) if state.get(BASE) else None


@dataclass(frozen=True)
class Checkpoint:
    """The content of a checkpoint. Arrays that are views of its files keep them on the disk: drop them once copied."""

    path: Path
    step: int
    weights: dict[str, Any]
    optimizer: dict[str, Any]
    state: dict[str, Any]

    @property
    def model(self) -> ModelConfig:
        """The architecture recorded in the checkpoint. Raises UserError if it is missing."""
        try:
            return with_file_names(ModelConfig.model_validate(self.state["identity"]["model"]["config"]))
        except (KeyError, TypeError, ValidationError):
            raise UserError(f"{self.path}: the architecture (identity.model.config) is missing in state.json") from None

    @property
    def tokenizer(self) -> Path | None:
        """The recorded tokenizer file, if it still exists."""
        recorded = Path(self.state.get("tokenizer") or "")
        return recorded if recorded.is_file() else None

    @property
    def is_simulated(self) -> bool:
        """True for a checkpoint of a simulated run, which has the tensors of one rank and no computed values."""
        return bool(self.state.get(SIMULATED))

    def refuse_simulated(self) -> None:
        """Raise UserError for a checkpoint of a simulated run."""
        if self.is_simulated:
            raise UserError(
                f"{self.path} was written by a simulated run, which computes nothing; pass another checkpoint"
            )

    def slice(self, name: str, offsets: Sequence[int], shape: Sequence[int]) -> np.ndarray:
        """Read the block of ``shape`` at ``offsets`` of weight or optimizer tensor ``name``.

        Raises:
            UserError: the tensor or the block does not exist.
        """
        source = self.weights.get(name, self.optimizer.get(name))
        if source is None:
            raise UserError(f"{self.path} has no tensor {name}{nearest(name, [*self.weights, *self.optimizer])}")
        full = tuple(source.shape)
        ends = [first + size for first, size in zip(offsets, shape, strict=True)]
        if len(ends) != len(full) or min(offsets, default=0) < 0 or any(map(operator.gt, ends, full)):
            raise UserError(
                f"{self.path}: tensor {name} of shape {list(full)} has no block {list(shape)} at {list(offsets)}"
            )
        return read_slices(source, tuple(map(slice, offsets, ends)))

    def require(self, weights: Expected, optimizer: Expected | None = None) -> None:
        """Check names, shapes and dtypes against those of the model, and of its optimizer if given.

        Raises:
            UserError: one message with the missing, surplus and misshapen tensors, up to ten of each kind.
        """
        lines = differences("weights", self.weights, weights)
        if optimizer is not None:
            lines += differences("optimizer", self.optimizer, optimizer)
        self._raise_differences(lines)

    def require_weights(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Check names and shapes of the weights, which may have any floating-point dtype. Raises like :meth:`require`."""
        self._raise_differences(shape_differences(self.weights, shapes))

    def _raise_differences(self, lines: list[str]) -> None:
        if lines:
            raise UserError(
                f"{self.path} does not fit the model of this run:\n  "
                + "\n  ".join(lines)
                + "\nuse the model section it was trained with, or another checkpoint"
            )


def load_checkpoint(
    path: Path | str,
    option: str = "--resume_training",
    with_optimizer: bool = True,
    read: Callable[[Path], Mapping[str, Any]] = read_tensors,
    peers: Peers = SINGLE_RANK,
    offers: bool = True,
) -> Checkpoint:
    """Load the checkpoint directory ``path`` after verifying sizes and checksums of all files.

    If ranks wrote the checkpoint in parts, under any layout, every tensor is a ``PartedTensor`` of the whole.

    Arguments:
        option: the option that error messages name.
        with_optimizer: False neither requires nor verifies the optimizer's files; ``optimizer`` is then empty.
        read: makes tensors of a file: ``read_tensors`` as arrays, ``stored_tensors`` lazily.
        peers: processes that all call this function and share the verification: each verifies every ``peers.count``-th file.
        offers: whether the error for a damaged checkpoint names the previous good one.

    Raises:
        UserError: the checkpoint is missing or damaged; names the file and the previous good checkpoint.
    """
    path = Path(path)
    roles = ALL_ROLES if with_optimizer else (WEIGHTS, STATE)
    manifest = verify_checkpoint(path, option, roles, peers, offers)
    state: dict[str, Any] = {}
    for name in manifest.names(STATE):
        try:
            content = read_json(path / name)
        except OSError as error:
            raise DamagedCheckpointError(path / name, f"cannot be read ({error.strerror})") from None
        if not isinstance(content, dict):
            raise DamagedCheckpointError(path / name, "is foreign: it is not a JSON object")
        state |= content

    def read_role(role: str) -> dict[str, Any]:
        files = [path / name for name in manifest.names(role)]
        if any(map(has_parts, files)):
            try:
                # A simulated run saves the parts of one rank only.
                return dict(read_parts(files, incomplete=bool(state.get(SIMULATED))))
            except ValueError as error:
                raise DamagedCheckpointError(path, f"is incomplete: {error}") from None
        return {name: tensor for file in files for name, tensor in read(file).items()}

    optimizer = read_role(OPTIMIZER) if with_optimizer else {}
    return Checkpoint(path, manifest.step, read_role(WEIGHTS), optimizer, state)


def verify_checkpoint(
    path: Path | str,
    option: str = "--resume_training",
    roles: tuple[str, ...] = ALL_ROLES,
    peers: Peers = SINGLE_RANK,
    offers: bool = True,
) -> Manifest:
    """Verify the files of ``roles`` and return the manifest. Raises UserError like ``load_checkpoint``."""
    path = Path(path)
    manifest, damage, mistake = None, None, None
    try:
        _check_path(path, option)
        manifest = _verify(path, roles, peers)
    except DamagedCheckpointError as error:
        damage = error
    except UserError as error:
        mistake = error
    # All ranks take part in both agreements, so that none loads what another one cannot.
    if not peers.agree(mistake is None):
        raise mistake or UserError(f"{option}={path} is visible to this rank but not to another; see that rank's log")
    if not peers.agree(damage is None):
        damage = damage or DamagedCheckpointError(path, "is damaged; the log of another rank names the file")
        offer = f"\n{_offer_previous(path, option, roles, peers.count == 1)}" if offers else ""
        raise DamagedCheckpointError(damage.path, f"{damage.problem}{offer}") from None
    assert manifest is not None
    return manifest


def is_good(path: Path, roles: tuple[str, ...] = ALL_ROLES) -> bool:
    """Return True if the checkpoint at ``path`` would load."""
    try:
        _verify(path, roles)
    except DamagedCheckpointError:
        return False
    return True


def _verify(path: Path, roles: tuple[str, ...], peers: Peers = SINGLE_RANK) -> Manifest:
    manifest = read_manifest(path)
    entry = parse_entry(path)
    if entry and entry.step != manifest.step:
        problem = f"is of step {manifest.step}: the directory was renamed, or files were copied between checkpoints"
        raise DamagedCheckpointError(path / MANIFEST, problem)
    verify_files(path, manifest, roles, peers.rank, peers.count)
    return manifest


def _check_path(path: Path, option: str) -> None:
    """Raise UserError for the usual mistakes: a missing path, one file of a checkpoint, the directory above checkpoints."""
    if path.is_file():
        directory = f": pass {option}={path.parent}" if (path.parent / MANIFEST).is_file() else ""
        raise UserError(f"{option}={path} is a file; a checkpoint is a directory{directory}")
    if not path.is_dir():
        raise UserError(f"{option}={path} does not exist{suggest_checkpoints(path)}{unexpanded(path)}")
    inside = entries(path) or entries(path / "checkpoint")
    if inside and not (path / MANIFEST).exists():
        raise UserError(f"{option}={path} contains checkpoints; pass one of them: {option}={inside[-1].path}")


def _offer_previous(damaged: Path, option: str, roles: tuple[str, ...], verify: bool) -> str:
    """Return a sentence that names the previous good checkpoint.

    With many ranks no single one reads whole checkpoints, so that the previous one is not verified.
    """
    entry = parse_entry(damaged)
    candidates = [item for item in reversed(entries(damaged.parent)) if item.path.name != damaged.name]
    if entry is not None:
        # The latest one before the damaged comes first, then later ones.
        candidates = [item for item in candidates if item.prefix == entry.prefix]
        later = [item for item in reversed(candidates) if item.age > entry.age]
        candidates = [item for item in candidates if item.age < entry.age] + later
    good = next((item.path for item in candidates if not verify or is_good(item.path, roles)), None)
    if good is None:
        without = f"; start without {option}" if option.startswith("--") else ""
        return f"{damaged.parent} has no other good checkpoint{without}"
    verb = "resume with" if option == "--resume_training" else "pass"
    return f"the previous {'good ' if verify else ''}checkpoint is available: {verb} {option}={good}"


def differences(role: str, tensors: Mapping[str, TensorSource], expected: Expected) -> list[str]:
    """Return a line each for the missing, the surplus and the misshapen tensors, with dtypes and shapes."""

    def describe(shape: tuple[int, ...], dtype: Any) -> str:
        return f"{np.dtype(dtype).name}{list(shape)}"

    required = {name: describe(shape, dtype) for name, (shape, dtype) in expected.items()}
    present = {name: describe(array.shape, array.dtype) for name, array in tensors.items()}
    kinds = {
        "missing": [f"{name} {required[name]}" for name in required if name not in present],
        "surplus": [f"{name} {present[name]}" for name in present if name not in required],
        "misshapen": [
            f"{name} {present[name]} instead of {required[name]}"
            for name in required
            if name in present and present[name] != required[name]
        ],
    }
    lines = []
    for kind, items in kinds.items():
        more = len(items) - MOST_LISTED
        listed = ", ".join(items[:MOST_LISTED]) + (f" and {more} more" if more > 0 else "")
        if items:
            lines.append(f"{role}, {kind} ({len(items)}): {listed}")
    return lines


def shape_differences(tensors: Mapping[str, TensorSource], shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Return the differences between weights and ``shapes``. Weights may have any floating-point dtype."""
    dtypes = {name: tensor.dtype for name, tensor in tensors.items() if tensor.dtype.name in FLOATING}
    return differences(
        "weights", tensors, {name: (shape, dtypes.get(name, np.float32)) for name, shape in shapes.items()}
    )
