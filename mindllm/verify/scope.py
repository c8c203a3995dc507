"""What of a YAML was checked, and in how much memory: the small model beside the real one, for the line of the verdict."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from mindllm.axes import EXPERTS, NAMED_AXES
from mindllm.config import RunConfig

WIDTHS = ("hidden_size", "vocab_size", "seq_length")


@dataclass(frozen=True)
class Scope:
    """``counts``: by what is counted, how many were checked and how many the YAML has; ``dtypes`` likewise, of computing.

    ``kinds``: kinds of layers, all of which are kept. ``smaller_mesh``: sizes of the mesh that are less than the YAML's.
    """

    counts: dict[str, tuple[int, int]]
    kinds: int
    dtypes: tuple[str, str]
    smaller_mesh: dict[str, tuple[int, int]]

    @property
    def text(self) -> str:
        """In words, only what is not all: ``4 of 61 layers (3 kinds), 8 ranks, float32 for bfloat16``."""
        return ", ".join(self._words())

    def _words(self) -> Iterator[str]:
        for what, (checked, whole) in self.counts.items():
            if what == "layers":
                of_kinds = f" ({self.kinds} kinds)" if self.kinds > 1 else ""
                yield f"{_of(checked, whole)} layers{of_kinds}"
            elif what == "ranks":
                yield f"{_of(checked, whole)} ranks" + (f" ({self._mesh()})" if self.smaller_mesh else "")
            elif checked != whole:
                yield f"{_of(checked, whole)} {what}"
        computed, asked = self.dtypes
        yield computed if computed == asked else f"{computed} for {asked}"

    def _mesh(self) -> str:
        return ", ".join(f"{axis} {_of(*sizes)}" for axis, sizes in self.smaller_mesh.items())

    def as_json(self) -> dict[str, Any]:
        """The same as plain values."""
        return {**asdict(self), "text": self.text}


@dataclass(frozen=True)
class Memory:
    """Bytes of the host: what was estimated before the check began, what it might take (None: unknown), what it took."""

    estimated: int
    budget: int | None
    taken: int


def scope_of(config: RunConfig, small: RunConfig) -> Scope:
    """What ``small`` leaves out of ``config``."""
    whole, kept = config.model.config.architecture, small.model.config.architecture
    sizes = {
        "layers": (len(kept.layers), len(whole.layers)),
        "ranks": (small.parallel_config.device_num, config.parallel_config.device_num),
        "micro-batches": _both(small.parallel_config, config.parallel_config, "micro_batch_num"),
        "accumulation steps": _both(small.runner_config, config.runner_config, "gradient_accumulation_steps"),
        "experts": _both(small.model.config, config.model.config, "expert_num"),
        **{key: _both(small.model.config, config.model.config, key) for key in WIDTHS},
    }
    mesh = {axis.key: _both(small.parallel_config, config.parallel_config, axis.key) for axis in (*NAMED_AXES, EXPERTS)}
    return Scope(
        sizes,
        len(whole.specifications()),
        (small.model.config.compute_dtype, config.model.config.compute_dtype),
        {axis: pair for axis, pair in mesh.items() if pair[0] != pair[1]},
    )


def _both(small: Any, whole: Any, key: str) -> tuple[int, int]:
    return getattr(small, key), getattr(whole, key)


def _of(checked: int, whole: int) -> str:
    return str(whole) if checked == whole else f"{checked} of {whole}"
