"""Trained weights without those they were trained beside, and by what their base is known again."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mindllm.config import ModelConfig, RunConfig
from mindllm.config.checks.tuning import mistakes
from mindllm.config.tuning import PetConfig
from mindllm.errors import UserError
from mindllm.train.checkpoint.loading import Base, Checkpoint, differences, model_of
from mindllm.train.checkpoint.tensors import TensorSource, read_slices

SHOWN = 12  # digits of a fingerprint


@dataclass(frozen=True)
class Adapter:
    """What was trained: weights by our names, as ``pet`` says; ``base`` where the files say it."""

    path: Path
    pet: PetConfig
    weights: Mapping[str, TensorSource]
    base: Base | None = None

    def model(self, base: ModelConfig) -> ModelConfig:
        """The model with this adapter.

        Raises:
            UserError: it is not an adapter of such a model; names what does not fit.
        """
        plain = base.base
        for key, message in mistakes(
            self.pet, plain.architecture.layers, plain.projections_in_files, plain.architecture.weight_shapes()
        ):
            raise UserError(f"{self.path}: {key}: {message}")
        model = plain.model_copy(update={"pet_config": self.pet})
        expected = {name: (shape, np.float32) for name, shape in model.architecture.trained_shapes().items()}
        found = {name: Shaped(tuple(item.shape)) for name, item in self.weights.items()}
        if lines := differences("weights", found, expected):
            raise UserError(f"{self.path}: adapter does not match this model: {lines[0]}")
        return model

    def require_base(self, base: Mapping[str, TensorSource], name: str) -> None:
        """Raises UserError where these are not the weights it was trained beside; an adapter that names none fits any."""
        if self.base is None or not self.base.fingerprint:
            return
        found = fingerprint(base)
        if found != self.base.fingerprint:
            trained = self.base.path or "weights drawn from a seed"
            raise UserError(
                f"{self.path}: was trained beside other weights than those of {name or 'this run'} (fingerprint "
                f"{self.base.fingerprint[:SHOWN]} of {trained}, found {found[:SHOWN]}); give its own base"
            )


@dataclass(frozen=True)
class Shaped:
    """A tensor of which the shape alone matters."""

    shape: tuple[int, ...]

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(np.float32)

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        return np.broadcast_to(np.float32(0), self.shape)


def adapter_of_checkpoint(checkpoint: Checkpoint) -> Adapter | None:
    """What a checkpoint of a tuned model holds; None where it holds all weights."""
    checkpoint.refuse_simulated()
    base = Base.of(checkpoint.state)
    pet = model_of(checkpoint).pet_config if base is not None else None
    return None if pet is None else Adapter(checkpoint.path, pet, checkpoint.weights, base)


def fingerprint(base: Mapping[str, TensorSource]) -> str:
    """SHA-256 of the first row of every weight that is in no layer, and of every weight of the first one, in fp32.

    The same whatever files hold them, and known without reading the rest.
    """
    digest = hashlib.sha256()
    for name in sorted(base):
        if name.startswith("model.layers.") and not name.startswith("model.layers.0."):
            continue
        source = base[name]
        first = (slice(0, 1), *(slice(0, size) for size in tuple(source.shape)[1:]))
        row = np.ascontiguousarray(read_slices(source, first), np.float32)
        digest.update(f"{name}{tuple(source.shape)}".encode() + row.tobytes())
    return digest.hexdigest()


def trained_beside(config: RunConfig, base: Mapping[str, TensorSource] | None, path: str) -> Base | None:
    """What the checkpoints of a run say of the weights they leave out; None where they leave out none.

    ``base``: the frozen weights, read from ``path``; None: they were drawn from the seed.
    """
    if not leaves_weights_out(config.model.config):
        return None
    if base is None:
        return Base("", "")
    names = config.model.config.base.architecture.weight_shapes()
    return Base(str(Path(path).resolve()), fingerprint({name: base[name] for name in names}))


def leaves_weights_out(model: ModelConfig) -> bool:
    """Whether some weights are frozen, so that checkpoints hold the others alone."""
    architecture = model.architecture
    return len(architecture.trained_shapes()) < len(architecture.weight_shapes())
