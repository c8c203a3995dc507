"""A training step as the model of time sees it: architecture, strategy, the plan of layers, and what the software fuses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mindllm.architecture.decoder import Architecture
from mindllm.architecture.experts import ExpertsSpec
from mindllm.architecture.layer import LayerSpec
from mindllm.architecture.optimizer_state import ADAMW
from mindllm.axes import CONTEXT, MeshSizes
from mindllm.parallel.layer_plan import LayerPlan
from mindllm.timing.costs.work import FP32_BYTES, HALF_BYTES

Dropout = Literal["drawn", "kept", "kernel", "fused"]
"""How it is computed, see ``costs/dropout.py``."""
Swap = tuple[tuple[str, int], ...]
"""Patterns of operators whose results wait on the host, and how many operators before its use each comes back."""


@dataclass(frozen=True)
class Strategy(MeshSizes):
    """How a step is spread over devices.

    Attributes:
        micro_batches: that go through the pipeline together.
        accumulation: how often that is done before an update.
        micro_batch_size: sequences of a replica in one of them.
        sequence_parallel: norms and residuals split over tensor-parallel ranks.
        optimizer_shard: optimizer state split over replicas.
        vocabulary_parallel: embedding table split over tensor-parallel ranks.
        repeat_exchanges: whether what is computed again exchanges again between tensor-parallel ranks.
        expert_parallel: groups of devices of a stage that share the experts.
        expert_model_parallel: ranks that share the weights of one expert; None: ``model_parallel``.
        copies: parts of a micro-batch with operators of their own, which exchange while those of others compute.
        row_parts: parts in which a layer takes its tokens outside attention, which exchange while those of others compute.
        context_parallel: ranks that share each sequence.
        exchanges_heads: whether attention exchanges their parts of a sequence for heads; otherwise it gathers keys and values.
        passes_keys: whether these go round the ranks instead, block by block.
        context_balanced: whether their queries see as many keys.
        schedule: order of micro-batches, ``1f1b``, ``gpipe``, ``zero_bubble_v``, ``seqpipe``, ``seqvpp`` or ``seqsmartvpp``.
        pieces: of its sequences in which a micro-batch goes through the pipeline.
        optimizer_ranks: replicas that share one copy of the optimizer state; None: all.
        accumulators_shard: whether accumulated gradients are split as the optimizer state is.
        slices_inputs: whether tensor-parallel ranks split what recomputed layers keep of their inputs.
    """

    data_parallel: int = 1
    model_parallel: int = 1
    pipeline_stage: int = 1
    micro_batches: int = 1
    accumulation: int = 1
    micro_batch_size: int = 1
    sequence_parallel: bool = False
    optimizer_shard: bool = False
    vocabulary_parallel: bool = True
    repeat_exchanges: bool = True
    expert_parallel: int = 1
    expert_model_parallel: int | None = None
    copies: int = 1
    row_parts: int = 1
    context_parallel: int = 1
    exchanges_heads: bool = False
    context_balanced: bool = False
    passes_keys: bool = False
    schedule: str = "1f1b"
    pieces: int = 1
    optimizer_ranks: int | None = None
    accumulators_shard: bool = False
    slices_inputs: bool = False

    @property
    def sequence_ranks(self) -> int:
        """Ranks over which norms and residuals are split."""
        return self.model_parallel if self.sequence_parallel else 1

    @property
    def input_ranks(self) -> int:
        """Return the number of tensor-parallel ranks over which the input of a recomputed layer is split."""
        return self.model_parallel if self.slices_inputs else self.sequence_ranks

    @property
    def expert_replicas(self) -> int:
        """Devices of a stage that hold the same part of the same experts."""
        return self.stage_device_num // (self.expert_parallel * self.expert_tensor_parallel)

    def shards(self, replicas: int) -> int:
        """Of so many replicas of a weight, how many share its optimizer state: all where ``optimizer_ranks`` does not divide
        them, as MindSpore has it.
        """
        if not self.optimizer_shard:
            return 1
        return replicas if self.optimizer_ranks is None or replicas % self.optimizer_ranks else self.optimizer_ranks

    def expert_shards(self, experts: int) -> int:
        """Of the replicas of a layer's experts, how many share their optimizer state: none where a rank's experts are not as
        many, or cannot be divided by them, for MindSpore cuts a weight along its first dimension.
        """
        shards = self.shards(self.expert_replicas)
        return 1 if experts // self.expert_parallel % shards else shards

    @property
    def runs(self) -> int:
        """How often a step runs each layer."""
        return self.micro_batches * self.pieces * self.accumulation

    @property
    def times_reduced(self) -> int:
        """How often a step reduces gradients over replicas: once, or, accumulated in parts, with every micro-batch."""
        return self.micro_batches * self.accumulation if self.optimizer_shard and self.accumulators_shard else 1

    @property
    def global_batch(self) -> int:
        """Sequences of a step."""
        return self.data_parallel * self.micro_batches * self.accumulation * self.micro_batch_size


@dataclass(frozen=True)
class SavedForms:
    """In which form a program keeps what gradients need, where programs differ; what MindSpore's dry run shows by default.

    Attributes:
        residual: bytes of a number that a norm was given.
        gathered: whether products keep what was gathered of a split sequence; otherwise it is gathered again.
        results: how often what attention's kernel yields is kept: for its gradient, and in another order for a product.
        statistics: bytes of a query and head for the kernel's gradient: eight maxima and eight sums.
        activation: whether what an activation yields is kept beside what it was given.
        padded: whether values are kept beside what zeros were put behind, where the kernel has them as wide as keys.
        routed: whether what routers are given is kept in single precision, too.
        logit: bytes of a logit at the loss: of it in single precision what is there at once.
        placeholders: whether a gradient in half precision stays for each shape of weight, where products add gradients up
            themselves and must hand on something all the same.
        casts: whether a step makes weights in half precision anew, and single gradients are there beside accumulators
            (``timing/weight_memory.py``); otherwise they are a part of the state.
    """

    residual: int = FP32_BYTES
    gathered: bool = True
    results: int = 2
    statistics: int = 16 * FP32_BYTES
    activation: bool = True
    logit: int = 3 * FP32_BYTES
    placeholders: bool = False
    casts: bool = True
    padded: bool = True
    routed: bool = True


TRANSFORMER_ENGINE = SavedForms(HALF_BYTES, False, 1, FP32_BYTES, False, HALF_BYTES, True, False, False, False)
"""Megatron-LM over TransformerEngine: norms in half precision, whose results are kept split and gathered again (Korthikanti
et al., 2022, section 4.2.2), one logarithm of sums of a query and head (Dao, 2023, section 3.1), the activation and its product
with the gate in one kernel, the gradient of logits in their place (fused cross entropy), one placeholder for each shape of
weight (``get_dummy_wgrad`` of its ``module/base.py``)."""


@dataclass(frozen=True)
class Numerics:
    """What is computed in which type, and with which kernels.

    Attributes:
        compute: type of matrix products.
        gradient_bytes: of a gradient as replicas exchange it.
        fused_attention: whether scores stay on chip.
        whole_masks: whether every score is computed, seen or not: rows hold documents.
        reads_masks: whether the fused kernel is given a mask of every pair of tokens, which it reads for each score that it
            computes. With a compressed one it reads and applies a mask on the diagonal alone.
        takes_bias: whether the fused kernel takes ALiBi's bias, a number in half precision for each score that it reads.
        softmax: type of composed attention's softmax.
        dropout: how the dropout is computed that layers have.
        wide_residual: whether hidden states between layers, and their sums, are in single precision.
        adds_gradients: whether a kernel of its own adds the gradient of a weight to those of earlier micro-batches. Megatron-LM's
            does for sums in half precision; where its gradient accumulation fusion applies, the product itself adds them.
        scaled_loss: whether gradients in half precision come from a scaled loss (Micikevicius et al., 2018), so that an update
            brings them to single precision, divides them by the scale and looks for infinities.
        plain_softmax: whether mask, softmax and casts of composed attention are kernels of their own, as in MindSpore's graph;
            Megatron-LM has one for all of it.
        causal_blocks: whether composed attention computes blocks of rows, each with the keys up to its own end, as on a CPU.
        forms: in which forms results are kept for gradients.
    """

    compute: str = "bfloat16"
    gradient_bytes: int = 4
    fused_attention: bool = True
    takes_bias: bool = False
    softmax: str = "float32"
    dropout: Dropout = "drawn"
    whole_masks: bool = False
    reads_masks: bool = False
    adds_gradients: bool = False
    scaled_loss: bool = False
    plain_softmax: bool = False
    causal_blocks: bool = False
    wide_residual: bool = False
    forms: SavedForms = SavedForms()

    @property
    def hidden_bytes(self) -> int:
        """Of a number between layers, and between stages."""
        return FP32_BYTES if self.wide_residual else HALF_BYTES


@dataclass(frozen=True)
class UpdateRule:
    """What makes of gradients an update, as section ``optimizer`` has it.

    Attributes:
        type: ``AdamW`` or ``Muon``.
        ns_steps: Newton-Schulz steps of Muon.
        nesterov: whether its momentum has Nesterov's form.
        block: numbers of a block of AdamW's moments in codes of 8 bits; 0: they are fp32.
        weight_bytes: bytes of a number of the weights, and of their gradients and accumulators.
        casts_weights: whether products read casts of the weights, which have another type.
        wide_sums: whether gradients in half precision are added up in single precision.
        fuses_casts: whether the update of weights in half precision is one kernel with its casts.
        master_weights: whether the state has weights in single precision, of which those of the model are rounded copies.
        scales_heads: whether QK-clip scales queries and keys behind it.
    """

    type: str = ADAMW
    ns_steps: int = 5
    nesterov: bool = True
    block: int = 0
    scales_heads: bool = False
    weight_bytes: int = FP32_BYTES
    casts_weights: bool = True
    master_weights: bool = False
    wide_sums: bool = False
    fuses_casts: bool = False

    @property
    def in_half(self) -> bool:
        """Return True if the weights are in half precision."""
        return self.weight_bytes == HALF_BYTES


BY_ADAMW = UpdateRule()


@dataclass(frozen=True, eq=False)
class Workload:
    """All that decides how long a step takes, but the device; equal to itself alone, so that its work is taken apart once.

    Attributes:
        loss_chunks: slices of the loss, whose logits are computed again for the gradient where there are several.
        swap: what waits on the host, layer by layer; empty: nothing.
        update: of the weights, where tuning has none of its own.
        reference: the model without its adapters, whose losses are computed beside, without gradients; None: nothing is compared.
    """

    architecture: Architecture
    seq_length: int
    strategy: Strategy
    plan: LayerPlan
    numerics: Numerics = Numerics()
    loss_chunks: int = 1
    swap: tuple[Swap, ...] = ()
    update: UpdateRule = BY_ADAMW
    reference: Architecture | None = None

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.strategy.global_batch * self.seq_length

    @property
    def accumulates(self) -> bool:
        """Whether gradients are added to accumulators (``train/distributed_step.py``)."""
        return self.strategy.micro_batches * self.strategy.accumulation > 1 or self.plan.stages > 1

    @property
    def sum_bytes(self) -> int:
        """Return the bytes of a number of the gradients that a step sums: over micro-batches, and then over replicas."""
        return FP32_BYTES if self.accumulates and self.update.wide_sums else self.update.weight_bytes

    @property
    def calls_network(self) -> bool:
        """Whether micro-batches call one compiled network (``parallel/build.py``); otherwise each has operators of its own."""
        reused = self.accumulates and not self.strategy.optimizer_shard and self.strategy.device_num > 1
        return self.plan.stages > 1 or reused

    @property
    def keeps_gradients(self) -> bool:
        """Whether a pass keeps all its gradients to its end: it is the only one of a step, or the one of a device alone, whose
        graph adds them to accumulators behind it (``train/step.py``).
        """
        return not self.accumulates or self.strategy.device_num == 1

    def exchanges_in(self, spec: LayerSpec) -> bool:
        """Whether the ranks of a replica, or those that share experts or sequences, exchange anything inside of a layer."""
        experts = isinstance(spec.feed_forward, ExpertsSpec) and self.strategy.expert_parallel > 1
        return experts or self.strategy.model_parallel > 1 or self.strategy.shares_sequences

    @property
    def rank_tokens(self) -> int:
        """Tokens of a micro-batch, or of a piece of it, that a rank of its sequences has."""
        whole = self.strategy.micro_batch_size * self.seq_length // self.strategy.size(CONTEXT)
        return whole // self.strategy.pieces

    @property
    def model_flops(self) -> float:
        """Of a step, without what is computed again; a reference has a forward pass alone, a third of what training takes."""
        compared = 0.0 if self.reference is None else self.reference.flops_per_token(self.seq_length) / 3
        return (self.architecture.flops_per_token(self.seq_length) + compared) * self.tokens
