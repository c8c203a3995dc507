"""Choose the small model of a check by the memory of this machine, and describe what it leaves out.

Memory is estimated before anything is compiled. Both sides of a check are in one process: the single device, whose activations
count every token of the global batch, and all ranks with their graphs and parts of weights and optimizer state. Ranks are
compiled in processes next to it. docs/cluster_check_method.md has the measured figures.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

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
RECORDED = 6  # forward and backward, and recomputation, on both sides
SINGLE_COPIES = 12  # of weights and state on the single device: its own, one after every step, results
RANK_COPIES = 3  # weights and two moments
ACTIVATIONS = (
    30  # values of a layer's width that a step keeps per token, and for each expert; measured with 8 and 16 experts
)
BACK_END = 1.6  # times the front end: 6.7 GB for 15 layers with experts and latent attention, instead of 4.1
WIDTHS = ("hidden_size", "vocab_size", "seq_length")


@dataclass(frozen=True)
class Needs:
    """Bytes of a process that compiles a rank, of the single device, and of all ranks while they are executed."""

    worker: int
    single: int
    ranks: int

    def total(self, workers: int) -> int:
        """Return the peak. Ranks are executed once all are compiled.

        Workers fork from a process with their common part. It waits, and soon each has its own pages: one more worker.
        """
        return self.single + max((workers + 1) * self.worker, self.ranks)


@dataclass(frozen=True)
class SmallModel:
    """The configuration that is checked, its memory, and the number of ranks to compile at a time."""

    config: RunConfig
    needs: Needs
    workers: int


def needs_of(small: RunConfig) -> Needs:
    """Return the memory of checking a small model."""
    ranks, weights = small.parallel_config.device_num, small.model.config.parameter_count() * FP32
    activations = _activation_bytes(small)
    single = _single_compile_bytes(small) + SINGLE_COPIES * weights + activations
    copies = RANK_COPIES * weights * ranks // small.parallel_config.pipeline_stage
    return Needs(compile_bytes(small), single, ranks * graph_bytes(small) + copies + activations)


def recorded_bytes(small: RunConfig) -> int:
    """Return the memory for the values of every operator on both sides, and for compiling the single device again."""
    return RECORDED * _activation_bytes(small) + _single_compile_bytes(small)


def _single_compile_bytes(small: RunConfig) -> int:
    """Return the memory to compile the single device with the back end; ranks need the front end only."""
    return int(BACK_END * compile_bytes(single_device(small)))


def _activation_bytes(small: RunConfig) -> int:
    """Return the bytes in fp32 that layers keep of a global batch. Every expert has space for all tokens."""
    tokens = small.global_batch_size * small.model.config.seq_length
    channels = 0
    for spec in small.model.config.architecture.layers:
        feed_forward = spec.feed_forward
        experts = 0 if isinstance(feed_forward, FeedForwardSpec) else feed_forward.router.experts
        channels += spec.attention.hidden_size * (1 + experts)
    return tokens * FP32 * ACTIVATIONS * channels


def fitting(
    config: RunConfig,
    real_dtype: bool,
    claim: MemoryClaim,
    most_ranks: int,
    workers: int | None,
    accumulation_steps: int = ACCUMULATION_STEPS,
) -> SmallModel:
    """Return the small model with the largest mesh that memory and ``most_ranks`` allow, and claim its memory.

    Raises:
        UserError: the smallest mesh does not fit.
    """
    smallest_need, at_once = None, workers or cores()
    meshes = list(reduced_meshes(config))
    for mesh in meshes:
        if mesh.device_num > most_ranks:
            continue
        try:
            small = reduce_model(config, real_dtype, mesh, accumulation_steps)
        except UserError:
            if mesh == meshes[0]:
                raise
            continue  # the sizes of this mesh do not go together for another reason
        needs = needs_of(small)
        smallest_need = needs.total(1) if smallest_need is None else min(smallest_need, needs.total(1))
        if claim.fits(needs.total(1)):
            counts = range(min(at_once, mesh.device_num), 0, -1)
            at_once = next(count for count in counts if claim.fits(needs.total(count)))
            claim.take(needs.total(at_once))
            return SmallModel(small, needs, at_once)
    if smallest_need is None:
        fewest = min(mesh.device_num for mesh in meshes)
        raise UserError(f"--most_ranks {most_ranks}: the smallest mesh of this kind has {fewest}; allow more")
    raise UserError(
        f"checking the smallest model of this kind takes about {gibibytes(smallest_need)}, "
        f"and there are {claim.describe()}: {ADVICE}"
    )


@dataclass(frozen=True)
class Scope:
    """The part of a configuration that was checked.

    Attributes:
        counts: by name, the number that was checked and the number in the YAML.
        kinds: kinds of layers, all of which are kept.
        dtypes: compute dtype of the check and of the YAML.
        smaller_mesh: sizes of the mesh that are smaller than in the YAML.
    """

    counts: dict[str, tuple[int, int]]
    kinds: int
    dtypes: tuple[str, str]
    smaller_mesh: dict[str, tuple[int, int]]

    @property
    def text(self) -> str:
        """Scope in words, as ``4 of 61 layers (3 kinds), 8 ranks, float32 for bfloat16``. Equal sizes are left out."""
        return ", ".join(self._words())

    def _words(self) -> Iterator[str]:
        for what, (checked, whole) in self.counts.items():
            if what == "layers":
                yield f"{_share(checked, whole)} layers" + (f" ({self.kinds} kinds)" if self.kinds > 1 else "")
            elif what == "ranks":
                mesh = ", ".join(f"{axis} {_share(*sizes)}" for axis, sizes in self.smaller_mesh.items())
                yield f"{_share(checked, whole)} ranks" + (f" ({mesh})" if mesh else "")
            elif checked != whole:
                yield f"{_share(checked, whole)} {what}"
        computed, configured = self.dtypes
        yield computed if computed == configured else f"{computed} for {configured}"

    def as_json(self) -> dict[str, Any]:
        """Return the scope as plain values."""
        return {**asdict(self), "text": self.text}


@dataclass(frozen=True)
class Memory:
    """Bytes of this machine: estimated before the check, allowed (None: unknown), and taken."""

    estimated: int
    budget: int | None
    taken: int


def scope_of(config: RunConfig, small: RunConfig) -> Scope:
    """Return what ``small`` leaves out of ``config``."""
    full, reduced = config.model.config.architecture, small.model.config.architecture
    counts = {
        "layers": (len(reduced.layers), len(full.layers)),
        "ranks": (small.parallel_config.device_num, config.parallel_config.device_num),
        "micro-batches": _both(small.parallel_config, config.parallel_config, "micro_batch_num"),
        "accumulation steps": _both(small.runner_config, config.runner_config, "gradient_accumulation_steps"),
        "experts": _both(small.model.config, config.model.config, "expert_num"),
        **{key: _both(small.model.config, config.model.config, key) for key in WIDTHS},
    }
    mesh = {axis.key: _both(small.parallel_config, config.parallel_config, axis.key) for axis in (*NAMED_AXES, EXPERTS)}
    return Scope(
        counts,
        len(full.specifications()),
        (small.model.config.compute_dtype, config.model.config.compute_dtype),
        {axis: pair for axis, pair in mesh.items() if pair[0] != pair[1]},
    )


def _both(small: Any, full: Any, key: str) -> tuple[int, int]:
    return getattr(small, key), getattr(full, key)


def _share(checked: int, whole: int) -> str:
    return str(whole) if checked == whole else f"{checked} of {whole}"
