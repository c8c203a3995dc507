"""One optimizer step over several devices in one graph: micro batches, accumulated gradients, one update.

The sibling of ``step.TrainStep`` with the same mathematics: the loss is a sum over tokens; gradients are divided once by
the tokens of the whole global batch, clipped by the norm over all devices, and skipped when that is not finite.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, lazy_inline, nn, ops

from mindllm.architecture.experts import ExpertsSpec
from mindllm.config import RunConfig
from mindllm.models.attention.largest_logit import largest_logits
from mindllm.models.experts.expert_load import is_probe
from mindllm.models.weights import shares_of
from mindllm.parallel import ParallelModel, build_parallel_model, set_parallel_context
from mindllm.parallel.context import input_columns
from mindllm.parallel.layout import mesh_of
from mindllm.parallel.parameter_layout import ParameterLayout
from mindllm.parallel.pipeline import TokenCount
from mindllm.parallel.sharding.weights import weight_cuts
from mindllm.parallel.weight_cut import WeightCut
from mindllm.train.optimizers.build import OPTIMIZERS, make_optimizer, shares_weights
from mindllm.train.optimizers.half_weights import clone_state
from mindllm.train.optimizers.spikes import limits_of_step
from mindllm.train.part_exchange import NormOfParts
from mindllm.train.step import ApplyGradients, GlobalNorm
from mindllm.train.watched import make_watch

accumulated = ops.MultitypeFuncGraph("accumulated")
clear_accumulated = ops.MultitypeFuncGraph("clear_accumulated")
# Other zeros are folded into constants of the size of every weight; multiplying by zero would keep an overflow for ever.
zeros_like = ops.auto_generate.ZerosLikeExt()


@accumulated.register("Tensor", "Tensor")
def _accumulated(accumulator, gradient):
    """The accumulator after the backward pass; ``gradient`` is a token the compiler returns in its place."""
    return ops.depend(accumulator, gradient)


@clear_accumulated.register("Tensor", "Tensor")
def _clear_accumulated(after, accumulator):
    return ops.assign(accumulator, zeros_like(ops.depend(accumulator, after)))


class SeededLoss(nn.Cell):
    """The summed loss times ``seed``: the one value gradients are taken of.

    It must be the only output: the compiler looks for the loss there to divide gradients by the number of its copies. And
    the seed must be an input: a constant would be reduced over a number of devices nobody has.
    """

    def __init__(self, network: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.network = network

    def construct(self, seed: Tensor, *columns: Tensor) -> Tensor:
        return self.network(True, *columns) * seed


class ReusedOptimizer(nn.Cell):
    """An optimizer that stays a graph of its own.

    Where gradients are accumulated without a pipeline, MindSpore's compiler follows every path from a gradient to the end
    of the step, without remembering where it has been. Paths into the update, which is skipped on overflow, have no end,
    and there are more of them than could ever be followed.
    """

    @lazy_inline
    def __init__(self, optimizer: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.optimizer = optimizer
        self.counts, self.updated, self.prepare = optimizer.counts, optimizer.updated, optimizer.prepare

    def construct(self, gradients: tuple[Tensor, ...], coefficient: Tensor, rate: Tensor) -> Tensor:
        return self.optimizer(gradients, coefficient, rate)


class DistributedStep(nn.Cell):
    """``(*columns, rate, scale, *limits, *group_rates) -> (mean loss, norm, applied, tokens)``, as ``step.TrainStep``.

    Columns are those of
    :func:`mindllm.parallel.context.input_columns`, ``[batch, seq]``; limits those of
    :func:`mindllm.train.optimizers.spikes.limits_of_step`; group rates the learning rates of groups of weights.

    In a pipeline the loss is real on the stage with the head only; the norm and its finiteness are the same everywhere.

    Args:
        parallel: the model on its devices.
        weights: those of all stages; the compiler drops what is not of this rank's.
        optimizer: updates ``weights``, or all but the first one: a shared embedding belongs to the first stage. The last
            stage sends its part of the gradient there, and must neither update it nor count it in the norm.
        positions: tokens of a whole global batch, masked or not.
        slices: parts the input arrays are given in; 1 where every rank holds the whole batch.
        sharded_optimizer: with a parallel optimizer, gradients leave the backward pass as slices; otherwise they stay
            in the accumulators.
        norm: of all gradients.
        limits: of norm and loss that the step is given: none, of the norm, or of both.
        groups: of weights with a learning rate of their own.
        loss_first: the update waits for the loss. Where that is computed again for the backward pass, gradients do not wait
            for it, and nothing else would keep the update from changing the weights it reads.
        watch: what the health figures are made of, an output behind the others.
        wide_accumulators: gradients in half precision are added up in float32.

    Attributes:
        state_layouts: by name, of optimizer state that the compiler knows no layout of.
    """

    def __init__(
        self,
        parallel: ParallelModel,
        weights: ParameterTuple,
        optimizer: nn.Cell,
        max_grad_norm: float | None,
        positions: int,
        slices: int,
        sharded_optimizer: bool,
        norm: nn.Cell,
        limits: int = 0,
        groups: int = 0,
        loss_first: bool = False,
        watch: nn.Cell | None = None,
        wide_accumulators: bool = False,
    ) -> None:
        super().__init__(auto_prefix=False)
        self.limits, self.groups = limits, groups
        self.network = SeededLoss(parallel.network)
        self.gradient = ops.value_and_grad(self.network, None, weights)
        self.first_updated = len(weights) - len(optimizer.parameters)
        self.state_layouts: Mapping[str, ParameterLayout] = getattr(optimizer, "layouts", {})
        self.tokens = TokenCount(slices, parallel.mesh.device_num)
        self.positions = float(positions)
        self.accumulates = parallel.parts > 1 or parallel.plan.stages > 1
        separate = parallel.reused and parallel.plan.stages == 1
        optimizer = ReusedOptimizer(optimizer) if separate else optimizer
        self.update = ApplyGradients(optimizer, max_grad_norm, norm, watch)
        self.loss_first = loss_first
        self.reads_accumulators = self.accumulates and not sharded_optimizer
        if self.accumulates:
            # The compiler knows them by this name.
            if wide_accumulators:
                self.accu_grads = clone_state(weights, "accu_grads")
            else:
                self.accu_grads = weights.clone(prefix="accu_grads", init="zeros")
        self.map = ops.HyperMap()

    def reset_logits(self) -> None:
        """Begins anew with the largest attention logits, when text was evaluated between two steps."""
        if self.update.watch is not None and self.update.watch.logits is not None:
            self.update.watch.logits.reset()

    def construct(self, *inputs):
        grouped = len(inputs) - self.groups
        after = grouped - self.limits
        columns, rate, scale, limits = inputs[: after - 2], inputs[after - 2], inputs[after - 1], inputs[after:grouped]
        seed = scale / self.positions
        loss, gradients = self.gradient(seed, *columns)
        tokens = self.tokens(columns[2])
        if self.loss_first:
            rate = ops.depend(rate, loss)
        if self.groups:
            rate = self.rates(rate, inputs[grouped:])
        if self.reads_accumulators:
            gradients = self.map(accumulated, self.accu_grads, gradients)
        loss = loss / (seed * tokens)
        unscale = self.positions / (scale * tokens)
        updated = self.update(gradients[self.first_updated :], unscale, rate, loss, *limits)
        norm = updated[0]
        if self.first_updated:
            loss = ops.depend(loss, gradients[0])  # unused, it would not be computed, nor sent to where it is awaited
        if self.accumulates:
            used = ops.depend(norm, updated[2:]) if len(updated) > 2 else norm  # what reads accumulators
            used = ops.depend(used, gradients[0]) if self.first_updated else used
            loss = ops.depend(loss, self.map(ops.partial(clear_accumulated, used), self.accu_grads))
        return (loss, norm, updated[1], tokens, *updated[2:])

    def rates(self, rate: Tensor, of_groups: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """That of weights without a group, then those of groups; all wait for what the first one waits for."""
        found: tuple[Tensor, ...] = (rate,)
        for one in of_groups:
            found = (*found, ops.depend(one, rate))
        return found


class DistributedLoss(nn.Cell):
    """Forward only: ``(*columns) -> summed loss`` of the whole global batch, nothing dropped; columns as those of a step.

    In a pipeline it is real on the stage with the head only. Tokens are counted on the host: in a graph without gradients the
    compiler takes a column that is used outside of the network for a slice, and would count the whole batch once per device.
    """

    def __init__(self, parallel: ParallelModel) -> None:
        super().__init__(auto_prefix=False)
        self.network = parallel.evaluated

    def construct(self, *columns: Tensor) -> Tensor:
        return self.network(False, *columns)


def build_distributed_step(
    config: RunConfig, rank: int, tell_rank: bool = True, alone: bool = False, balanced: bool = False
) -> DistributedStep:
    """Builds the training step of ``rank``; sets MindSpore's parallel context for it, the rank only where it is told.

    ``alone``: for its graph only, which does not tell whether other stages have whole layers. ``balanced``: tokens that are
    sent to their experts have the lengths of a router that spreads them evenly, for what has no values to count.
    """
    set_parallel_context(config, rank, tell_rank)
    stage = mesh_of(config).stage_of(rank) if alone else None
    return distributed_step(config, build_parallel_model(config, stage, balanced), rank)


def build_distributed_loss(config: RunConfig, rank: int, tell_rank: bool = True) -> DistributedLoss:
    """Builds what evaluates on ``rank``; sets MindSpore's parallel context for it, the rank only where it is told."""
    set_parallel_context(config, rank, tell_rank)
    return distributed_loss(build_parallel_model(config))


def cell_key(config: RunConfig, rank: int) -> Hashable:
    """What the cells of ``rank`` depend on: ranks for which it is equal build the same ones, so that the compiler alone, which
    asks for the rank when it needs it, tells them apart.
    """
    pet, architecture = config.model.config.pet_config, config.model.config.architecture
    has_own_groups = any(
        isinstance(spec.feed_forward, ExpertsSpec) and spec.feed_forward.grouped for spec in architecture.layers
    )
    of_ranks = config.optimizer.needs_cuts or (pet is not None and pet.tuner.name in OPTIMIZERS)
    has_own_groups |= config.parallel_config.passes_keys
    if of_ranks or has_own_groups or config.parallel.strategy_ckpt_save_file:
        return rank
    uses_embedding_twice = architecture.head.tied or any(spec.is_mtp for spec in architecture.layers)
    mesh = mesh_of(config)
    return uses_embedding_twice and mesh.stage_of(rank) == config.last_stage  # see ``_embedding_is_elsewhere``


def distributed_loss(parallel: ParallelModel) -> DistributedLoss:
    """What evaluates a model on its devices."""
    return DistributedLoss(parallel).set_train(False)


def distributed_step(config: RunConfig, parallel: ParallelModel, rank: int) -> DistributedStep:
    """The training step of ``rank`` for a model on its devices."""
    weights = ParameterTuple(parallel.network.trainable_params())
    owned = weights[1:] if _embedding_is_elsewhere(parallel, rank) else weights
    pet = config.model.config.pet_config
    exchanges = config.optimizer.needs_cuts or (pet is not None and pet.tuner.whole_gradients)
    cuts = weight_cuts(parallel.model, config) if exchanges else None
    optimizer = make_optimizer(owned, config, cuts, rank, shares_of(parallel.network), largest_logits(parallel.network))
    wrapper = config.runner_wrapper
    step = DistributedStep(
        parallel,
        weights,
        optimizer,
        max_grad_norm=wrapper.max_grad_norm if wrapper.use_clip_grad else None,
        positions=config.global_batch_size * config.model.config.seq_length,
        slices=input_slices(config),
        sharded_optimizer=config.parallel.enable_parallel_optimizer,
        norm=_norm(config, owned, cuts),
        limits=len(limits_of_step(config)),
        groups=len(config.grouped_lr_schedule.grouped),
        loss_first=config.model.config.loss_chunks > 1 and parallel.plan.stages == 1,
        watch=make_watch(config, parallel.model, optimizer, whole=False),
        wide_accumulators=config.optimizer.accumulate_in_float32,
    )
    return step.set_train()


def _norm(config: RunConfig, weights: Sequence[Parameter], cuts: Mapping[str, WeightCut] | None) -> nn.Cell:
    """The compiler adds squares over the devices, and divides those of a gradient by the devices that have the same one where
    it finds the way from weight to square. AdaLoRA's penalty, which is added to gradients, hides that way.
    """
    pet = config.model.config.pet_config
    if pet is None or not pet.tuner.changes_gradients or cuts is None:
        return GlobalNorm()
    if not shares_weights(config, cuts):
        return GlobalNorm(whole=True)
    return NormOfParts([cuts[weight.name] for weight in weights if not is_probe(weight.name)])


def _embedding_is_elsewhere(parallel: ParallelModel, rank: int) -> bool:
    """Whether the embedding of the first stage is used on this rank's, and the first one trains it: a head that is tied to it,
    or layers that predict ahead and look up tokens in it. Both are on the last stage; of those between the compiler drops the
    embedding like other weights that are not theirs, and would drop an output with what reads its gradient.
    """
    embedding, stage = parallel.model.model.tok_embeddings.embedding_weight, parallel.mesh.stage_of(rank)
    return (
        (parallel.model.tied or parallel.model.has_mtp)
        and embedding.requires_grad
        and 0 < stage == parallel.plan.last_stage
    )


def example_inputs(config: RunConfig, training: bool = True) -> list[Tensor]:
    """A batch of the shapes a rank is given; for training also the rate, the loss scale, the limits of a step and the rates of
    groups of weights.
    """
    shape = (config.global_batch_size // input_slices(config), config.model.config.seq_length)
    ids = Tensor(np.zeros(shape, np.int32))
    values = (1e-4, 1.0, *(1.0 for _ in limits_of_step(config)), *(1e-4 for _ in config.grouped_lr_schedule.grouped))
    scalars = [Tensor(value, ms.float32) for value in values] if training else []
    columns = dict.fromkeys(input_columns(config), ids) | {"loss_mask": Tensor(np.ones(shape, np.float32))}
    return [*columns.values(), *scalars]


def input_slices(config: RunConfig) -> int:
    """Number of different parts of the batch that ranks are given."""
    if config.parallel.full_batch:
        return 1
    strategy = config.parallel.dataset_strategy
    if strategy is None:
        return config.parallel_config.data_parallel
    columns = len(input_columns(config))
    if len(strategy) != columns or len(set(strategy)) != 1 or len(strategy[0]) != 2 or strategy[0][1] != 1:
        wanted = [[config.parallel_config.data_parallel, 1]] * columns
        message = f"must split the batch of {columns} columns alike (value {list(map(list, strategy))}); write {wanted}"
        raise config.error("parallel.dataset_strategy", message)
    return strategy[0][0]
