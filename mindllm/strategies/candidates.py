"""The strategies of a run on a number of devices, and why those are left out that cannot be."""

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
from mindllm.strategies.dispatch import NO_DISPATCH, Dispatch, dispatches, with_dispatch
from mindllm.timing.device import Device
from mindllm.timing.workload import Strategy

MICRO_BATCH_SIZES = (1, 2, 4, 8)
CHUNKS = (1, 2, 3, 4)
PIECES = (1, 2, 4, 8)
"""In which sequences go through a pipeline (``seq_split_num``)."""


@dataclass(frozen=True)
class Sharing:
    """How many ranks share each sequence, whether they exchange it for heads, in balanced halves, and whether keys go round."""

    ranks: int = 1
    heads: bool = False
    balanced: bool = False
    ring: bool = False

    @property
    def name(self) -> str:
        forms = ["of heads"] * self.heads + ["in a ring"] * self.ring + ["in halves"] * self.balanced
        return " ".join((f" cp{self.ranks}", *forms)) if self.ranks > 1 else ""

    def keys(self) -> dict[str, object]:
        """Of ``parallel_config``."""
        return {
            CONTEXT.key: self.ranks,
            "context_parallel_algo": ULYSSES if self.heads else RING if self.ring else GATHER,
            "context_parallel_balanced": self.balanced,
        }


GATHERED, BALANCED, OF_HEADS = Sharing(), Sharing(balanced=True), Sharing(heads=True)
RINGS = (Sharing(balanced=True, ring=True), Sharing(ring=True))


@dataclass(frozen=True)
class Candidate:
    """One strategy; ``micro_batches`` are accumulated where there is no pipeline. ``schedule``: one of ``SEARCHED``."""

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
    dispatch: Dispatch = NO_DISPATCH

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
        """What the model of time is told."""
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
        """The keys of the run YAML, but for the plan of layers."""
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
    left_out: Counter[str],
    schedules: Collection[str] = (ONE_F_ONE_B,),
    forms: Collection[str] = (),
) -> Iterator[Candidate]:
    """Yield all strategies whose sizes divide, in the orders ``schedules`` of micro-batches; ``left_out`` counts the others by
    reason. ``forms``: those of the dispatch of experts; empty: those that compute what the run computes.
    """
    widest = device.links[0].devices or devices
    for tensor in _divisors(devices):
        if reason := _tensor_reason(config, tensor, widest):
            left_out[reason] += 1
            continue
        for stages in _divisors(devices // tensor):
            if stages > config.model.config.layer_count:
                left_out["more stages than layers"] += 1
                continue
            ranks = devices // tensor // stages
            for sharing in sharings(config, ranks, tensor, stages):
                most = PIECES[-1] if SEQPIPE in schedules else 1
                replicas = ranks // sharing.ranks
                for one in _split(config, sharing, replicas, tensor, stages, batch, left_out, most, forms):
                    if can_dispatch(config, one):
                        yield from _in_orders(config, one, schedules)
                    else:
                        left_out["MindSpore does not compile this dispatch of experts on this mesh"] += 1


def _in_orders(config: RunConfig, one: Candidate, schedules: Collection[str]) -> Iterator[Candidate]:
    """A strategy in each of the orders of micro-batches that MindSpore trains it in, as far as a candidate decides."""
    for schedule in (known for known in SEARCHED if known in schedules):
        for pieces in PIECES if schedule in IN_PIECES else PIECES[:1]:
            ordered = replace(one, schedule=schedule, pieces=pieces)
            if _may_order(config, ordered):
                yield ordered


def _may_order(config: RunConfig, one: Candidate) -> bool:
    """Whether MindSpore trains a candidate in its order (``config/checks``), and another one does not have the same."""
    if one.pieces > 1:
        enough = one.micro_batches * (one.pieces if one.chunks == 1 else 1) >= one.pipeline_stage > 1
        return enough and not any(check_pieces(_with_pieces(config, one)))
    if one.pipeline_stage > 1 and one.micro_batches < one.pipeline_stage:
        return False
    if one.schedule == ZERO_BUBBLE_V:
        enough = one.chunks == CHUNKS_OF_A_V and one.micro_batches >= 2 * one.pipeline_stage
        return enough and not config.parallel.parallel_optimizer_config.gradient_accumulation_shard
    return one.schedule == ONE_F_ONE_B or (one.schedule == SEQSMARTVPP and one.chunks > 1)  # whole, others are 1F1B


def _with_pieces(config: RunConfig, one: Candidate) -> RunConfig:
    """The run with what its pieces are checked by."""
    sizes = {
        "model_parallel": one.model_parallel, "pipeline_stage": one.pipeline_stage, "seq_split_num": one.pieces,
        "use_seq_parallel": one.sequence_parallel, **one.sharing.keys(),
    }  # fmt: skip
    pipeline = config.parallel.pipeline_config.model_copy(update={"pipeline_scheduler": one.schedule})
    model = config.model.config.model_copy(update={"pp_interleave_num": one.chunks, "fine_grain_interleave": 1})
    changes = {
        "parallel_config": config.parallel_config.model_copy(update=sizes),
        "parallel": config.parallel.model_copy(update={"pipeline_config": pipeline}),
        "model": config.model.model_copy(update={"config": model}),
        "micro_batch_interleave_num": 1,
    }
    return config.model_copy(update=changes)


def _split(
    config: RunConfig, sharing: Sharing, replicas: int, tensor: int, stages: int, batch: int, left_out: Counter[str],
    pieces: int, forms: Collection[str],
) -> Iterator[Candidate]:  # fmt: skip
    """Candidates in 1F1B whose micro-batches fill the stages, if need be in ``pieces``."""
    experts = expert_layouts(config, replicas, tensor, forms)
    for size in MICRO_BATCH_SIZES if sharing.ranks == 1 else MICRO_BATCH_SIZES[:1]:
        if batch % (replicas * size):
            left_out["the global batch is not divisible by replicas x micro-batch"] += 1
            continue
        micro = batch // replicas // size
        if stages > 1 and micro * pieces < stages:
            left_out["fewer micro-batches than stages"] += 1
            continue
        for chunks in CHUNKS if stages > 1 else CHUNKS[:1]:
            if chunks > 1 and (stages * chunks > config.model.config.layer_count or micro % stages):
                left_out["chunks need a layer each, and micro-batches in groups of the stages"] += 1
                continue
            switches = itertools.product(
                (False, True)[: 1 + (tensor > 1)], (False, True)[: 1 + (replicas * sharing.ranks > 1)], experts
            )
            for sequence, shard, (groups, ranks, dispatch) in switches:
                yield Candidate(
                    replicas, tensor, stages, chunks, size, micro, sequence, shard, groups, ranks, sharing, dispatch=dispatch
                )  # fmt: skip


def sharings(config: RunConfig, devices: int, tensor: int, stages: int) -> Iterator[Sharing]:
    """Sequences whole, and shared in each form that the run may have; in balanced halves wherever that changes something."""
    yield Sharing()
    for ranks in _divisors(devices)[1:]:
        for alike in ((BALANCED, GATHERED), (OF_HEADS,), RINGS):
            forms = (replace(form, ranks=ranks) for form in alike)
            yield from itertools.islice((form for form in forms if _may_share(config, form, tensor, stages)), 1)


def _may_share(config: RunConfig, sharing: Sharing, tensor: int, stages: int) -> bool:
    """In a pipeline in a ring, or where rows have masks anyway: the formula of memory does not count those that others bring.

    Not beside experts and latent attention, whose exchanges are not modelled.
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
        return [(1, None, NO_DISPATCH)]
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


def can_dispatch(config: RunConfig, one: Candidate) -> bool:
    """Return True if MindSpore compiles the dispatch of a candidate on its mesh, whatever its plan recomputes."""
    if not one.dispatch.grouped:
        return True
    run = with_dispatch(config, one.dispatch)
    sizes = {
        "data_parallel": one.data_parallel, "model_parallel": one.model_parallel, "pipeline_stage": one.pipeline_stage,
        "expert_parallel": one.expert_parallel, "expert_model_parallel": one.expert_model_parallel,
    }  # fmt: skip
    model = run.model.config.model_copy(update={"pp_interleave_num": one.chunks})
    parts = one.micro_batches if one.pipeline_stage == 1 else 1
    changes = {
        "parallel_config": run.parallel_config.model_copy(update=sizes),
        "parallel": run.parallel.model_copy(update={"enable_parallel_optimizer": one.optimizer_shard}),
        "runner_config": run.runner_config.model_copy(update={"gradient_accumulation_steps": parts}),
        "recompute_config": run.recompute_config.model_copy(update={"recompute": True}),
        "model": run.model.model_copy(update={"config": model}),
    }
    return not any(check_experts(run.model_copy(update=changes)))
