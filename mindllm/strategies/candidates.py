"""Candidate strategies of a run on a number of devices, and the reasons to exclude others."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from pydantic import TypeAdapter

from mindllm.architecture.layer_counts import (
    CHUNKS_OF_A_V,
    IN_PIECES,
    ONE_F_ONE_B,
    SEARCHED,
    SEQPIPE,
    SEQSMARTVPP,
    ZERO_BUBBLE_V,
)
from mindllm.architecture.optimizer_state import weight_of_cut_blocks
from mindllm.axes import CONTEXT
from mindllm.config import RunConfig
from mindllm.config.checks.layers import check_experts
from mindllm.config.checks.sequence import check_context_parallel, check_pieces
from mindllm.config.parallel import GATHER, RING, ULYSSES
from mindllm.strategies.dispatch import DENSE_DISPATCH, Dispatch, dispatches, with_dispatch
from mindllm.timing.device import Device
from mindllm.timing.workload import Strategy

MICRO_BATCH_SIZES = (1, 2, 4, 8)
CHUNKS = (1, 2, 3, 4)
PIECES = (1, 2, 4, 8)
"""In which sequences go through a pipeline (``seq_split_num``)."""


@dataclass(frozen=True)
class Sharing:
    """Context parallelism: ranks per sequence, and whether heads are exchanged, halves balanced, keys in a ring."""

    ranks: int = 1
    heads: bool = False
    balanced: bool = False
    ring: bool = False

    @property
    def name(self) -> str:
        forms = ["of heads"] * self.heads + ["in a ring"] * self.ring + ["in halves"] * self.balanced
        return " ".join((f" cp{self.ranks}", *forms)) if self.ranks > 1 else ""

    def keys(self) -> dict[str, object]:
        """Return the keys of ``parallel_config``."""
        return {
            CONTEXT.key: self.ranks,
            "context_parallel_algo": ULYSSES if self.heads else RING if self.ring else GATHER,
            "context_parallel_balanced": self.balanced,
        }


GATHERED, BALANCED, HEAD_EXCHANGE = Sharing(), Sharing(balanced=True), Sharing(heads=True)
RINGS = (Sharing(balanced=True, ring=True), Sharing(ring=True))


@dataclass(frozen=True)
class Candidate:
    """A strategy; ``micro_batches`` are accumulated if there is no pipeline. ``schedule`` is one of ``SEARCHED``."""

    data_parallel: int
    model_parallel: int
    pipeline_stage: int
    chunks: int
    micro_batch_size: int
    micro_batches: int
    sequence_parallel: bool
    optimizer_shard: bool
    expert_parallel: int = 1
    expert_model_parallel: int | None = None
    sharing: Sharing = Sharing()
    schedule: str = ONE_F_ONE_B
    pieces: int = 1
    dispatch: Dispatch = DENSE_DISPATCH

    @property
    def v_shape(self) -> bool:
        """Whether the second chunk of a stage runs back."""
        return self.schedule == ZERO_BUBBLE_V

    @property
    def name(self) -> str:
        chunks = " in a V" if self.v_shape else f" x {self.chunks} chunks" if self.chunks > 1 else ""
        if self.schedule in IN_PIECES:
            chunks += f" {self.schedule}" + f" of {self.pieces} pieces" * (self.pieces > 1)
        marks = ", seq" * self.sequence_parallel + ", shard" * self.optimizer_shard
        experts = (
            ""
            if self.expert_model_parallel is None
            else f" ep{self.expert_parallel} x {self.expert_model_parallel}{self.dispatch.suffix(self.expert_parallel)}"
        )
        return (
            f"dp{self.data_parallel}{self.sharing.name} tp{self.model_parallel} pp{self.pipeline_stage}{chunks}{experts}, "
            f"{self.micro_batches} of {self.micro_batch_size}{marks}"
        )

    def strategy(self, config: RunConfig) -> Strategy:
        """Return the strategy for the model of time."""
        piped = self.pipeline_stage > 1
        return Strategy(
            self.data_parallel,
            self.model_parallel,
            self.pipeline_stage,
            micro_batches=self.micro_batches if piped else 1,
            accumulation=1 if piped else self.micro_batches,
            micro_batch_size=self.micro_batch_size,
            sequence_parallel=self.sequence_parallel,
            optimizer_shard=self.optimizer_shard,
            vocabulary_parallel=not config.parallel_config.vocab_emb_dp,
            repeat_exchanges=config.recompute_config.mp_comm_recompute,
            expert_parallel=self.expert_parallel,
            expert_model_parallel=self.expert_model_parallel,
            context_parallel=self.sharing.ranks,
            exchanges_heads=self.sharing.heads,
            context_balanced=self.sharing.balanced,
            passes_keys=self.sharing.ring,
            schedule=self.schedule,
            pieces=self.pieces,
        )

    def overrides(self) -> dict[str, object]:
        """Return the keys of the run YAML, without the plan of layers."""
        piped = self.pipeline_stage > 1
        return {
            "use_parallel": True,
            "parallel_config.data_parallel": self.data_parallel,
            **{f"parallel_config.{key}": value for key, value in self.sharing.keys().items()},
            "parallel_config.model_parallel": self.model_parallel,
            "parallel_config.pipeline_stage": self.pipeline_stage,
            "parallel_config.expert_parallel": self.expert_parallel,
            "parallel_config.expert_model_parallel": self.expert_model_parallel,
            "parallel_config.micro_batch_num": self.micro_batches if piped else 1,
            "parallel_config.seq_split_num": self.pieces,
            "parallel_config.use_seq_parallel": self.sequence_parallel,
            "runner_config.batch_size": self.micro_batch_size,
            "runner_config.gradient_accumulation_steps": 1 if piped else self.micro_batches,
            "parallel.enable_parallel_optimizer": self.optimizer_shard,
            "micro_batch_interleave_num": 1,
            "model.model_config.fine_grain_interleave": 1,
            "model.model_config.pp_interleave_num": self.chunks,
            "parallel.pipeline_config.pipeline_interleave": self.chunks > 1 or self.schedule in IN_PIECES,
            "parallel.pipeline_config.pipeline_scheduler": self.schedule,
            **(self.dispatch.keys() if self.expert_model_parallel is not None else {}),
        }

    def tree(self) -> dict[str, object]:
        return asdict(self)


def read_candidate(tree: dict[str, Any]) -> Candidate:
    """Return the inverse of :meth:`Candidate.tree`; raise ValueError for any other value."""
    return CANDIDATE.validate_python(tree)


CANDIDATE = TypeAdapter(Candidate)


def candidates(
    config: RunConfig,
    devices: int,
    batch: int,
    device: Device,
    excluded: Counter[str],
    schedules: Collection[str] = (ONE_F_ONE_B,),
    forms: Collection[str] = (),
) -> Iterator[Candidate]:
    """Yield all strategies whose sizes divide, in the given ``schedules`` of micro-batches.

    ``excluded`` counts the others by reason. ``forms`` are the dispatch forms of experts; empty: the forms that compute the same
    as the run.
    """
    widest = device.links[0].devices or devices
    for tensor in _divisors(devices):
        if reason := _tensor_reason(config, tensor, widest):
            excluded[reason] += 1
            continue
        for stages in _divisors(devices // tensor):
            if stages > config.model.config.layer_count:
                excluded["more stages than layers"] += 1
                continue
            ranks = devices // tensor // stages
            for sharing in sharings(config, ranks, tensor, stages):
                most = PIECES[-1] if SEQPIPE in schedules else 1
                replicas = ranks // sharing.ranks
                for candidate in _split(config, sharing, replicas, tensor, stages, batch, excluded, most, forms):
                    if can_dispatch(config, candidate):
                        yield from _in_orders(config, candidate, schedules)
                    else:
                        excluded["MindSpore does not compile this dispatch of experts on this mesh"] += 1


def _in_orders(config: RunConfig, candidate: Candidate, schedules: Collection[str]) -> Iterator[Candidate]:
    """Yield a strategy in each schedule of micro-batches that MindSpore supports for it, as far as a candidate decides."""
    for schedule in (searched for searched in SEARCHED if searched in schedules):
        for pieces in PIECES if schedule in IN_PIECES else PIECES[:1]:
            ordered = replace(candidate, schedule=schedule, pieces=pieces)
            if _may_order(config, ordered):
                yield ordered


def _may_order(config: RunConfig, candidate: Candidate) -> bool:
    """Return True if MindSpore supports the schedule of a candidate (``config/checks``) and no other candidate is equivalent."""
    if candidate.pieces > 1:
        enough = (
            candidate.micro_batches * (candidate.pieces if candidate.chunks == 1 else 1) >= candidate.pipeline_stage > 1
        )
        return enough and not any(check_pieces(_with_pieces(config, candidate)))
    if candidate.pipeline_stage > 1 and candidate.micro_batches < candidate.pipeline_stage:
        return False
    if candidate.schedule == ZERO_BUBBLE_V:
        enough = candidate.chunks == CHUNKS_OF_A_V and candidate.micro_batches >= 2 * candidate.pipeline_stage
        return enough and not config.parallel.parallel_optimizer_config.gradient_accumulation_shard
    return candidate.schedule == ONE_F_ONE_B or (
        candidate.schedule == SEQSMARTVPP and candidate.chunks > 1
    )  # whole, others are 1F1B


def _with_pieces(config: RunConfig, candidate: Candidate) -> RunConfig:
    """Return the run with the keys that determine whether pieces are supported."""
    sizes = {
        "model_parallel": candidate.model_parallel, "pipeline_stage": candidate.pipeline_stage, "seq_split_num": candidate.pieces,
        "use_seq_parallel": candidate.sequence_parallel, **candidate.sharing.keys(),
    }  # fmt: skip
    pipeline = config.parallel.pipeline_config.model_copy(update={"pipeline_scheduler": candidate.schedule})
    model = config.model.config.model_copy(update={"pp_interleave_num": candidate.chunks, "fine_grain_interleave": 1})
    changes = {
        "parallel_config": config.parallel_config.model_copy(update=sizes),
        "parallel": config.parallel.model_copy(update={"pipeline_config": pipeline}),
        "model": config.model.model_copy(update={"config": model}),
        "micro_batch_interleave_num": 1,
    }
    return config.model_copy(update=changes)


def _split(
    config: RunConfig, sharing: Sharing, replicas: int, tensor: int, stages: int, batch: int, excluded: Counter[str],
    pieces: int, forms: Collection[str],
) -> Iterator[Candidate]:  # fmt: skip
    """Yield candidates in 1F1B whose micro-batches fill the stages, possibly in ``pieces``."""
    experts = expert_layouts(config, replicas, tensor, forms)
    for size in MICRO_BATCH_SIZES if sharing.ranks == 1 else MICRO_BATCH_SIZES[:1]:
        if batch % (replicas * size):
            excluded["the global batch is not divisible by replicas x micro-batch"] += 1
            continue
        micro = batch // replicas // size
        if stages > 1 and micro * pieces < stages:
            excluded["fewer micro-batches than stages"] += 1
            continue
        for chunks in CHUNKS if stages > 1 else CHUNKS[:1]:
            if chunks > 1 and (stages * chunks > config.model.config.layer_count or micro % stages):
                excluded["chunks need a layer each, and micro-batches in groups of the stages"] += 1
                continue
            switches = itertools.product(
                (False, True)[: 1 + (tensor > 1)], (False, True)[: 1 + (replicas * sharing.ranks > 1)], experts
            )
            for sequence, shard, (groups, ranks, dispatch) in switches:
                yield Candidate(
                    replicas, tensor, stages, chunks, size, micro, sequence, shard, groups, ranks, sharing, dispatch=dispatch
                )  # fmt: skip


def sharings(config: RunConfig, devices: int, tensor: int, stages: int) -> Iterator[Sharing]:
    """Yield whole sequences, and each supported form of context parallelism, in balanced halves if that has an effect."""
    yield Sharing()
    for ranks in _divisors(devices)[1:]:
        for variants in ((BALANCED, GATHERED), (HEAD_EXCHANGE,), RINGS):
            forms = (replace(form, ranks=ranks) for form in variants)
            yield from itertools.islice((form for form in forms if _may_share(config, form, tensor, stages)), 1)


def _may_share(config: RunConfig, sharing: Sharing, tensor: int, stages: int) -> bool:
    """Return True if the models of memory and time cover this context parallelism.

    A pipeline requires a ring, or rows with masks: the formula of memory does not count additional masks. Experts and latent
    attention are not covered.
    """
    model = config.model.config
    if model.expert_num > 1 or model.kv_lora_rank is not None:
        return False
    if stages > 1 and not config.train_dataset.document_columns and not sharing.ring:
        return False
    changes = {"model_parallel": tensor, "pipeline_stage": stages, "use_seq_parallel": tensor > 1, **sharing.keys()}
    sizes = config.parallel_config.model_copy(update=changes)
    return not any(check_context_parallel(config.model_copy(update={"parallel_config": sizes})))


def expert_layouts(
    config: RunConfig, replicas: int, tensor: int, forms: Collection[str]
) -> list[tuple[int, int | None, Dispatch]]:
    """Return the ways to share experts among the devices of a stage: groups, ranks of each, and the dispatch of tokens.

    An expert has one rank, or as many as there are tensor-parallel ones; experts of sorted tokens are whole on their devices.
    A group never holds a part of a replica's tensor-parallel ranks. A dense model has a single way.
    """
    model = config.model.config
    if model.expert_num == 1:
        return [(1, None, DENSE_DISPATCH)]
    return [
        (groups, ranks, dispatch)
        for ranks in sorted({1, tensor})
        if model.moe_intermediate_size % ranks == 0
        for groups in _divisors(replicas * tensor // ranks)
        if model.expert_num % groups == 0 and groups * ranks % tensor == 0
        for dispatch in dispatches(config, groups, forms)
        if ranks == 1 or not dispatch.grouped
    ]


def _tensor_reason(config: RunConfig, tensor: int, widest: int) -> str:
    model = config.model.config
    if tensor > widest:
        return "tensor-parallel ranks of several nodes"
    for key in ("num_heads", "n_kv_heads", "intermediate_size", "vocab_size", "seq_length"):
        if getattr(model, key) % tensor:
            return f"{key} is not divisible by the tensor-parallel ranks"
    if weight_of_cut_blocks(model.architecture.trained_shapes(), tensor, config.optimizer.block):
        return "tensor-parallel ranks would have parts of blocks of optimizer state"
    return ""


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def can_dispatch(config: RunConfig, candidate: Candidate) -> bool:
    """Return True if MindSpore compiles the dispatch of a candidate on its mesh, whatever its plan recomputes."""
    if not candidate.dispatch.grouped:
        return True
    run = with_dispatch(config, candidate.dispatch)
    sizes = {
        "data_parallel": candidate.data_parallel, "model_parallel": candidate.model_parallel,
        "pipeline_stage": candidate.pipeline_stage,
        "expert_parallel": candidate.expert_parallel, "expert_model_parallel": candidate.expert_model_parallel,
    }  # fmt: skip
    model = run.model.config.model_copy(update={"pp_interleave_num": candidate.chunks})
    parts = candidate.micro_batches if candidate.pipeline_stage == 1 else 1
    changes = {
        "parallel_config": run.parallel_config.model_copy(update=sizes),
        "parallel": run.parallel.model_copy(update={"enable_parallel_optimizer": candidate.optimizer_shard}),
        "runner_config": run.runner_config.model_copy(update={"gradient_accumulation_steps": parts}),
        "recompute_config": run.recompute_config.model_copy(update={"recompute": True}),
        "model": run.model.model_copy(update={"config": model}),
    }
    return not any(check_experts(run.model_copy(update=changes)))
