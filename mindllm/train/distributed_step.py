"""One optimizer step over several devices in one graph: micro-batches, accumulated gradients, one update.

The mathematics is that of ``step.TrainStep``: the loss is a sum over tokens. Gradients are divided once by the tokens of the
global batch, clipped by the norm over all devices, and not applied if that is not finite.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, lazy_inline, nn, ops

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
from mindllm.train.optimizers.build import make_optimizer, shares_weights
from mindllm.train.optimizers.half_weights import clone_state
from mindllm.train.optimizers.spikes import limits_of_step
from mindllm.train.part_exchange import PartNorm
from mindllm.train.step import ApplyGradients, GlobalNorm
from mindllm.train.watched import make_watch

accumulated = ops.MultitypeFuncGraph("accumulated")
clear_accumulated = ops.MultitypeFuncGraph("clear_accumulated")
# Other zeros are folded into constants of the size of every weight. Multiplying by zero would keep an infinity.
zeros_like = ops.auto_generate.ZerosLikeExt()


@accumulated.register("Tensor", "Tensor")
def _accumulated(accumulator, gradient):
    """Return the accumulator after the backward pass. ``gradient`` is only a token that the compiler returns instead."""
    return ops.depend(accumulator, gradient)


@clear_accumulated.register("Tensor", "Tensor")
def _clear_accumulated(after, accumulator):
    return ops.assign(accumulator, zeros_like(ops.depend(accumulator, after)))


class SeededLoss(nn.Cell):
    """The summed loss times ``seed``, which is differentiated.

    It must be the only output: the compiler divides gradients by the number of copies of the loss that it finds there. The seed
    must be an input: a constant would be reduced over a wrong number of devices.
    """

    def __init__(self, network: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.network = network

    def construct(self, seed: Tensor, *columns: Tensor) -> Tensor:
        return self.network(True, *columns) * seed


class ReusedOptimizer(nn.Cell):
    """An optimizer that is compiled as a separate graph.

    With gradient accumulation without a pipeline, MindSpore's compiler follows every path from a gradient to the end of the step
    and does not mark visited nodes. The number of paths through the conditional update is exponential.
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

    Columns are those of :func:`mindllm.parallel.context.input_columns`, ``[batch, seq]``; limits are those of
    :func:`mindllm.train.optimizers.spikes.limits_of_step`; group rates are the learning rates of weight groups.

    In a pipeline the loss is valid on the stage with the head only. The norm and the overflow check are the same on all stages.

    Args:
        parallel: the model on its devices.
        weights: the weights of all stages; the compiler drops those of other stages.
        optimizer: updates ``weights``, or all but the first: a shared embedding belongs to the first stage. The last stage sends
            its part of the gradient there, and must neither update the embedding nor count it in the norm.
        max_grad_norm: clip gradients to this norm; None: do not clip.
        positions: positions of a global batch, masked or not.
        slices: parts that the input arrays are split into; 1 if every rank reads the whole batch.
        sharded_optimizer: gradients leave the backward pass as slices (parallel optimizer). Otherwise they stay in the
            accumulators.
        norm: computes the norm of all gradients.
        limits: number of limit inputs: 0, 1 (norm) or 2 (norm and loss).
        groups: number of weight groups with their own learning rate.
        loss_first: the update waits for the loss. If the loss is recomputed for the backward pass, gradients do not wait for it,
            and the update could change weights that it still reads.
        watch: computes the sums of the health figures, the last output.
        wide_accumulators: accumulate half-precision gradients in float32.

    Attributes:
        state_layouts: layouts of optimizer state that the compiler does not know, by name.
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
            # The compiler recognizes accumulators by this name.
            if wide_accumulators:
                self.accu_grads = clone_state(weights, "accu_grads")
            else:
                self.accu_grads = weights.clone(prefix="accu_grads", init="zeros")
        self.map = ops.HyperMap()

    def reset_logits(self) -> None:
        """Reset the largest attention logits after text was evaluated between two steps."""
        if self.update.watch is not None and self.update.watch.logits is not None:
            self.update.watch.logits.reset()

    def construct(self, *inputs):
        grouped = len(inputs) - self.groups
        end = grouped - self.limits
        columns, rate, scale, limits = inputs[: end - 2], inputs[end - 2], inputs[end - 1], inputs[end:grouped]
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
            # Without a use, the gradient would be neither computed nor sent to the stage that waits for it.
            loss = ops.depend(loss, gradients[0])
        if self.accumulates:
            # Accumulators are cleared after everything that reads them.
            after = ops.depend(norm, updated[2:]) if len(updated) > 2 else norm
            after = ops.depend(after, gradients[0]) if self.first_updated else after
            loss = ops.depend(loss, self.map(ops.partial(clear_accumulated, after), self.accu_grads))
        return (loss, norm, updated[1], tokens, *updated[2:])

    def rates(self, rate: Tensor, group_rates: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the default rate and the group rates, which wait for the same operators."""
        rates: tuple[Tensor, ...] = (rate,)
        for group_rate in group_rates:
            rates = (*rates, ops.depend(group_rate, rate))
        return rates


class DistributedLoss(nn.Cell):
    """Forward only: ``(*columns) -> summed loss`` of the global batch without dropout; columns as in a training step.

    In a pipeline it is valid on the stage with the head only. Tokens are counted on the host: in a graph without gradients the
    compiler treats a column that is used outside of the network as a slice, and would count the batch once per device.
    """

    def __init__(self, parallel: ParallelModel) -> None:
        super().__init__(auto_prefix=False)
        self.network = parallel.evaluated

    def construct(self, *columns: Tensor) -> Tensor:
        return self.network(False, *columns)


def build_distributed_step(
    config: RunConfig, rank: int, tell_rank: bool = True, alone: bool = False, balanced: bool = False
) -> DistributedStep:
    """Build the training step of ``rank`` and set MindSpore's parallel context.

    Args:
        config: the run.
        rank: the rank.
        tell_rank: also set the rank in the parallel context.
        alone: build the layers of this rank's stage only.
        balanced: assume evenly loaded experts, for simulations without values.
    """
    set_parallel_context(config, rank, tell_rank)
    stage = mesh_of(config).stage_of(rank) if alone else None
    return distributed_step(config, build_parallel_model(config, stage, balanced), rank)


def build_distributed_loss(config: RunConfig, rank: int, tell_rank: bool = True) -> DistributedLoss:
    """Build the evaluation cell of ``rank`` and set MindSpore's parallel context, including the rank if ``tell_rank``."""
    set_parallel_context(config, rank, tell_rank)
    return distributed_loss(build_parallel_model(config))


def distributed_loss(parallel: ParallelModel) -> DistributedLoss:
    """Return the evaluation cell of a model on its devices."""
    return DistributedLoss(parallel).set_train(False)


def distributed_step(config: RunConfig, parallel: ParallelModel, rank: int) -> DistributedStep:
    """Return the training step of ``rank`` for a model on its devices."""
    weights = ParameterTuple(parallel.network.trainable_params())
    trained = weights[1:] if _is_embedding_remote(parallel, rank) else weights
    pet = config.model.config.pet_config
    exchanges = config.optimizer.needs_cuts or (pet is not None and pet.tuner.whole_gradients)
    cuts = weight_cuts(parallel.model, config) if exchanges else None
    optimizer = make_optimizer(
        trained, config, cuts, rank, shares_of(parallel.network), largest_logits(parallel.network)
    )
    wrapper = config.runner_wrapper
    step = DistributedStep(
        parallel,
        weights,
        optimizer,
        max_grad_norm=wrapper.max_grad_norm if wrapper.use_clip_grad else None,
        positions=config.global_batch_size * config.model.config.seq_length,
        slices=input_slices(config),
        sharded_optimizer=config.parallel.enable_parallel_optimizer,
        norm=_norm(config, trained, cuts),
        limits=len(limits_of_step(config)),
        groups=len(config.grouped_lr_schedule.grouped),
        loss_first=config.model.config.loss_chunks > 1 and parallel.plan.stages == 1,
        watch=make_watch(config, parallel.model, optimizer, whole=False),
        wide_accumulators=config.optimizer.accumulate_in_float32,
    )
    return step.set_train()


def _norm(config: RunConfig, weights: Sequence[Parameter], cuts: Mapping[str, WeightCut] | None) -> nn.Cell:
    """Return the cell that computes the global norm.

    The compiler sums squares over the devices and divides by the number of replicas if it finds the path from the weight to its
    square. AdaLoRA's penalty, which is added to gradients, hides that path.
    """
    pet = config.model.config.pet_config
    if pet is None or not pet.tuner.changes_gradients or cuts is None:
        return GlobalNorm()
    if not shares_weights(config, cuts):
        return GlobalNorm(whole=True)
    return PartNorm([cuts[weight.name] for weight in weights if not is_probe(weight.name)])


def _is_embedding_remote(parallel: ParallelModel, rank: int) -> bool:
    """Return True if this rank's stage uses an embedding that the first stage trains: a tied head, or MTP layers.

    Both are on the last stage. On the stages between, the compiler drops the embedding like any other weight of another stage.
    """
    embedding, stage = parallel.model.model.tok_embeddings.embedding_weight, parallel.mesh.stage_of(rank)
    return (
        (parallel.model.tied or parallel.model.has_mtp)
        and embedding.requires_grad
        and 0 < stage == parallel.plan.last_stage
    )


def example_inputs(config: RunConfig, training: bool = True) -> list[Tensor]:
    """Return inputs with the shapes of a rank's batch; for training also the rate, loss scale, limits and group rates."""
    shape = (config.global_batch_size // input_slices(config), config.model.config.seq_length)
    ids = Tensor(np.zeros(shape, np.int32))
    values = (1e-4, 1.0, *(1.0 for _ in limits_of_step(config)), *(1e-4 for _ in config.grouped_lr_schedule.grouped))
    scalars = [Tensor(value, ms.float32) for value in values] if training else []
    columns = dict.fromkeys(input_columns(config), ids) | {"loss_mask": Tensor(np.ones(shape, np.float32))}
    return [*columns.values(), *scalars]


def input_slices(config: RunConfig) -> int:
    """Return the number of different parts that ranks read of a batch.

    Raises:
        UserError: ``dataset_strategy`` does not split all columns alike along the batch.
    """
    if config.parallel.full_batch:
        return 1
    strategy = config.parallel.dataset_strategy
    if strategy is None:
        return config.parallel_config.data_parallel
    columns = len(input_columns(config))
    if len(strategy) != columns or len(set(strategy)) != 1 or len(strategy[0]) != 2 or strategy[0][1] != 1:
        strategies = [[config.parallel_config.data_parallel, 1]] * columns
        message = (
            f"must split the batch of {columns} columns alike (value {list(map(list, strategy))}); write {strategies}"
        )
        raise config.error("parallel.dataset_strategy", message)
    return strategy[0][0]
