"""What of a YAML was checked, and in how much memory: the small model beside the real one, for the line of the verdict.

How much memory of this machine a check takes is told before anything is compiled, and the small model is one that fits into it.

Measured on this package's forms and on models of several kinds (see docs/cluster_check.md). Both sides stand in one process: the
single device, whose activations count every token of the global batch, and all ranks with their graphs and their parts of
weights and optimizer state. Beside it ranks are compiled.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from mindllm.architecture.layer import LayerSpec
from mindllm.architecture.parts import FeedForwardSpec
from mindllm.axes import EXPERTS, NAMED_AXES
from mindllm.compiled.rank.host_needs import compile_bytes, graph_bytes
from mindllm.config import RunConfig
from mindllm.errors import UserError
from mindllm.jobs.cores import cores
from mindllm.jobs.memory import ADVICE, MemoryClaim, gibibytes
from mindllm.reduced_runs.mesh import reduced_meshes
from mindllm.reduced_runs.model import ACCUMULATION_STEPS, reduce_model, single_device

FP32 = 4
RECORDED = 6  # forward and backward, what is recomputed, on both sides
STATES = 12  # copies of weights and optimizer state on the single device: its own, one after every step, results
OWN = 3  # copies of a rank: weights and two moments
KEPT = 30  # values of a layer's width that a step keeps for each token, and as many of each expert's
"""Measured with 8 and 16 experts: see docs/cluster_check.md."""
TO_THE_END = 1.6  # times the front end: 6.7 GB of 15 layers with experts and latent attention, where that takes 4.1
WIDTHS = ("hidden_size", "vocab_size", "seq_length")


@dataclass(frozen=True)
class Needs:
    """Bytes: of a rank's process while it is compiled, of the single device, of all ranks while they are executed."""

    worker: int
    single: int
    ranks: int

    def total(self, workers: int) -> int:
        """The most at a time: ranks are executed when all are compiled.

        They are forked from a process that has read what they share. It waits, and soon each has pages of its own: a worker more.
        """
        return self.single + max((workers + 1) * self.worker, self.ranks)


@dataclass(frozen=True)
class SmallModel:
    """What is checked in place of a configuration; ``needs`` of it and ``workers``, the ranks that are compiled at a time."""

    config: RunConfig
    needs: Needs
    workers: int


def needs_of(small: RunConfig) -> Needs:
    """What checking a small model takes."""
    ranks, weights = small.parallel_config.device_num, small.model.config.parameter_count() * FP32
    activations = _activations(small)
    single = _compile_single(small) + STATES * weights + activations
    copies = OWN * weights * ranks // small.parallel_config.pipeline_stage
    return Needs(compile_bytes(small), single, ranks * graph_bytes(small) + copies + activations)


def recorded_bytes(small: RunConfig) -> int:
    """What it takes to keep every value of every operator of both sides, and to compile the single device once more."""
    return RECORDED * _activations(small) + _compile_single(small)


def _compile_single(small: RunConfig) -> int:
    """What it takes to compile the step of the single device, to its end; of a rank the front end is enough."""
    return int(TO_THE_END * compile_bytes(single_device(small)))


def _activations(small: RunConfig) -> int:
    """What the layers keep of a global batch for the backward pass, in fp32."""
    tokens = small.global_batch_size * small.model.config.seq_length
    return tokens * FP32 * sum(KEPT * _values(spec) for spec in small.model.config.architecture.layers)


def _values(spec: LayerSpec) -> int:
    """Channels that a layer has for each token; every expert has room for all of them."""
    hidden = spec.attention.hidden_size
    return hidden if isinstance(spec.feed_forward, FeedForwardSpec) else hidden * (1 + spec.feed_forward.router.experts)


def fitting(
    config: RunConfig,
    real_dtype: bool,
    claim: MemoryClaim,
    most_ranks: int,
    workers: int | None,
    accumulation_steps: int = ACCUMULATION_STEPS,
) -> SmallModel:
    """The small model of ``config`` on the most of its mesh that memory and ``most_ranks`` allow; memory is claimed.

    Raises:
        UserError: the smallest one does not fit.
    """
    least, at_once = None, workers or cores()
    found = list(reduced_meshes(config))
    for mesh in found:
        if mesh.device_num > most_ranks:
            continue
        try:
            small = reduce_model(config, real_dtype, mesh, accumulation_steps)
        except UserError:
            if mesh == found[0]:
                raise
            continue  # sizes that do not go together for another reason than the kind of the mesh
        needs = needs_of(small)
        least = needs.total(1) if least is None else min(least, needs.total(1))
        if claim.fits(needs.total(1)):
            at_once = next(
                count for count in range(min(at_once, mesh.device_num), 0, -1) if claim.fits(needs.total(count))
            )
            claim.take(needs.total(at_once))
            return SmallModel(small, needs, at_once)
    if least is None:
        fewest = min(mesh.device_num for mesh in found)
        raise UserError(f"--most_ranks {most_ranks}: the smallest mesh of this kind has {fewest}; allow more")
    raise UserError(
        f"checking the smallest model of this kind takes about {gibibytes(least)}, and there are {claim.describe()}: {ADVICE}"
    )


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
