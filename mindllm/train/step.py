"""One optimizer step as compiled cells: forward, backward, global-norm clipping, overflow check, update.

The loss and gradients are sums over tokens, divided once by the number of tokens of the global batch. So every token has
the same weight, regardless of its micro-batch, accumulation step or device. Sums over the processes of a job are part of the
compiled step.
"""

from __future__ import annotations

from itertools import accumulate

import mindspore as ms
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore import ops as P

from mindllm.train.optimizers.half_weights import clone_state, value_rounding

CLIP_EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_ and Megatron-LM

square_sum = ops.MultitypeFuncGraph("square_sum")
# The parallel compiler recognizes this operator and sums the slices of a sharded gradient over its devices
# (as in mindspore.ops.clip_by_global_norm).
expand_slice_sum = P.ExpandDims().add_prim_attr("grad_scale", True)


class SumOverRanks(nn.Cell):
    """All-reduces loss, tokens and gradients (all fp32) in one message. Every rank gets the same bits.

    One message, because each waits for the slowest rank. MindSpore 2.10 can only sum fp32 over the processes of a CPU job.
    """

    def __init__(self, weights: ParameterTuple) -> None:
        super().__init__(auto_prefix=False)
        self.shapes = tuple(tuple(weight.shape) for weight in weights)
        self.sizes = tuple(weight.size for weight in weights)
        self.starts = (0, *accumulate(self.sizes))
        self.all_reduce = P.AllReduce()
        self.concat = P.Concat()
        self.slice = P.Slice()

    def construct(self, loss: Tensor, tokens: Tensor, gradients: tuple[Tensor, ...]):
        pieces = [gradient.reshape((-1,)) for gradient in gradients]
        summed = self.all_reduce(self.concat((*pieces, loss.reshape((1,)), tokens.reshape((1,)))))
        gradients = tuple([self.part(summed, index) for index in range(len(self.shapes))])
        total = self.starts[-1]
        return summed[total], summed[total + 1], gradients

    def part(self, summed: Tensor, index: int) -> Tensor:
        return self.slice(summed, (self.starts[index],), (self.sizes[index],)).reshape(self.shapes[index])


@square_sum.register("Tensor")
def _square_sum(gradient):
    return expand_slice_sum(_of_squares(gradient, ()), 0)


whole_square_sum = ops.MultitypeFuncGraph("whole_square_sum")
expand_sum = P.ExpandDims()


@whole_square_sum.register("Tensor")
def _whole_square_sum(gradient):
    return expand_sum(_of_squares(gradient, ()), 0)


square_sum_by_rows = ops.MultitypeFuncGraph("square_sum_by_rows")


@square_sum_by_rows.register("Tensor")
def _square_sum_by_rows(gradient):
    return ops.reshape(ops.reduce_sum(_of_squares(gradient, -1), ()), (1,))


def _of_squares(gradient, axis):
    return ops.reduce_sum(ops.square(ops.cast(gradient, ms.float32)), axis)


class GlobalNorm(nn.Cell):
    """Euclidean norm of all gradients, fp32 scalar; slices of sharded gradients are summed over devices.

    ``whole``: gradients are not sharded, and the compiler sums nothing over devices.
    """

    def __init__(self, whole: bool = False) -> None:
        super().__init__()
        self.square_sum = whole_square_sum if whole else square_sum
        self.map = ops.HyperMap()
        self.sum = P.AddN()
        self.sqrt = P.Sqrt()
        self.reshape = P.Reshape()

    def construct(self, gradients: tuple[Tensor, ...]) -> Tensor:
        return self.reshape(self.sqrt(self.sum(self.map(self.square_sum, gradients))), ())


class LocalNorm(nn.Cell):
    """Euclidean norm of gradients that are whole on this device. Sums rows first, which is four times as fast on a CPU.

    ``L2Loss`` is as fast, but accumulates in fp32 from first to last: the norm of a million elements is off by 0.1%.
    """

    def __init__(self) -> None:
        super().__init__()
        self.map = ops.HyperMap()
        self.sum = P.AddN()
        self.sqrt = P.Sqrt()
        self.reshape = P.Reshape()

    def construct(self, gradients: tuple[Tensor, ...]) -> Tensor:
        return self.reshape(self.sqrt(self.sum(self.map(square_sum_by_rows, gradients))), ())


class ScaledLoss(nn.Cell):
    """The summed loss times ``seed``, which is differentiated, and the unscaled loss."""

    def __init__(self, model: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.model = model

    def construct(
        self,
        input_ids: Tensor,
        labels: Tensor,
        loss_mask: Tensor,
        seed: Tensor,
        segment_starts: Tensor | None = None,
        position_ids: Tensor | None = None,
        random: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        loss = self.model(input_ids, labels, loss_mask, segment_starts, position_ids, random)
        return loss * seed, loss


class ForwardBackward(nn.Cell):
    """Inputs ``[batch, seq]`` and the loss scale -> summed loss, number of tokens, scaled gradients of every weight.

    Gradients are scaled by ``scale / positions``, the magnitude of a mean loss, for which loss scales are tuned. ``positions`` is
    the number of positions in the global batch; None if the inputs are the global batch. So whether a step overflows does not
    depend on the number of micro-batches.
    """

    def __init__(self, model: nn.Cell, weights: ParameterTuple, positions: int | None = None) -> None:
        super().__init__(auto_prefix=False)
        self.network = ScaledLoss(model)  # an attribute: operators keep the path of their cell as scope
        self.gradient = ops.value_and_grad(self.network, None, weights, has_aux=True)
        self.positions = positions
        self.rounding = value_rounding(weights)

    def construct(self, input_ids, labels, loss_mask, scale, segment_starts=None, position_ids=None, random=None):
        positions = self.positions
        if positions is None:
            positions = input_ids.shape[0] * input_ids.shape[1]
        seed = scale / float(positions)
        (_, loss), gradients = self.gradient(input_ids, labels, loss_mask, seed, segment_starts, position_ids, random)
        if self.rounding is not None:
            gradients = self.rounding(gradients)
        return loss, loss_mask.sum(), gradients


class ApplyGradients(nn.Cell):
    """Unscales, clips and applies gradients.

    Weights and optimizer state stay unchanged if the norm is not finite, or if the norm or loss exceeds its limit
    (:mod:`mindllm.train.optimizers.spikes`).

    ``watch``: computes the sums of the health figures (:mod:`mindllm.train.watched`), which become the last output.
    """

    def __init__(
        self, optimizer: nn.Cell, max_grad_norm: float | None, norm: nn.Cell, watch: nn.Cell | None = None
    ) -> None:
        super().__init__(auto_prefix=False)
        self.watch = watch
        self.optimizer = optimizer
        self.counts, self.updated, self.prepare = optimizer.counts, optimizer.updated, optimizer.prepare
        self.global_norm = norm
        self.max_grad_norm = max_grad_norm

    def construct(self, gradients, unscale, rate, loss=None, norm_limit=None, loss_limit=None):
        """Return (norm, whether gradients were applied, health sums if any).

        Args:
            gradients: scaled gradients of all weights.
            unscale: factor from a gradient to the gradient of the mean loss per token.
            rate: the learning rate, or a tuple: the default rate, then the rates of the weight groups.
            loss: mean loss, compared with ``loss_limit``.
            norm_limit: skip the update if the norm exceeds it.
            loss_limit: skip the update if the loss exceeds it.
        """
        if self.prepare is not None:
            gradients = self.prepare(gradients, unscale)
        weight_gradients = tuple([gradients[index] for index in self.updated]) if self.counts else gradients
        norm = self.global_norm(weight_gradients) * unscale
        coefficient = unscale
        if self.max_grad_norm is not None:
            coefficient = unscale * ops.minimum(self.max_grad_norm / (norm + CLIP_EPSILON), Tensor(1.0, ms.float32))
        applied = ops.isfinite(norm)
        if norm_limit is not None:
            applied = ops.logical_and(applied, norm <= norm_limit)
        if loss_limit is not None:
            applied = ops.logical_and(applied, loss <= loss_limit)
        if applied:
            norm = ops.depend(norm, self.optimizer(gradients, coefficient, rate))
        if self.watch is None:
            return norm, applied
        watched = self.watch(weight_gradients, rate, norm)
        return (watched[0], applied, *watched[1:])


class TrainStep(nn.Cell):
    """A whole step in one graph: ``(input_ids, labels, loss_mask, rate, scale) -> (mean loss, norm, applied, tokens)``.

    Optional inputs follow: document columns and dropout keys, the limits of norm and loss, the learning rates of weight groups.
    ``watch`` adds the last output, as in :class:`ApplyGradients`.
    """

    def __init__(
        self, model: nn.Cell, optimizer: nn.Cell, max_grad_norm: float | None, watch: nn.Cell | None = None
    ) -> None:
        super().__init__(auto_prefix=False)
        self.forward_backward = ForwardBackward(model, optimizer.parameters)
        self.update = ApplyGradients(optimizer, max_grad_norm, LocalNorm(), watch)

    def construct(
        self,
        input_ids,
        labels,
        loss_mask,
        rate,
        scale,
        segment_starts=None,
        position_ids=None,
        random=None,
        norm_limit=None,
        loss_limit=None,
        *group_rates,
    ):
        loss, tokens, gradients = self.forward_backward(
            input_ids, labels, loss_mask, scale, segment_starts, position_ids, random
        )
        nominal = float(input_ids.shape[0] * input_ids.shape[1])
        loss = loss / tokens
        rates = (rate, *group_rates) if group_rates else rate
        updated = self.update(gradients, nominal / (scale * tokens), rates, loss, norm_limit, loss_limit)
        return (loss, updated[0], updated[1], tokens, *updated[2:])


class AccumulateStep(nn.Cell):
    """Adds gradients, loss and tokens of one micro-batch to accumulators, which ``ApplyAccumulated`` applies.

    ``positions``: rows times sequence length of the global batch. ``wide``: accumulate half-precision gradients in float32.
    """

    def __init__(self, model: nn.Cell, weights: ParameterTuple, positions: int, wide: bool = False) -> None:
        super().__init__(auto_prefix=False)
        self.positions = positions
        self.forward_backward = ForwardBackward(model, weights, positions)
        if wide:
            self.gradients = clone_state(weights, "accumulated")
        else:
            self.gradients = weights.clone(prefix="accumulated", init="zeros")
        self.loss = Parameter(Tensor(0.0, ms.float32), name="accumulated_loss", requires_grad=False)
        self.tokens = Parameter(Tensor(0.0, ms.float32), name="accumulated_tokens", requires_grad=False)
        self.rounding = None if wide else value_rounding(weights)
        self.map = ops.HyperMap()

    def construct(self, input_ids, labels, loss_mask, scale, segment_starts=None, position_ids=None, random=None):
        loss, tokens, gradients = self.forward_backward(
            input_ids, labels, loss_mask, scale, segment_starts, position_ids, random
        )
        if self.rounding is not None:
            sums = self.rounding(self.map(ops.add, self.gradients, gradients))
            done = self.map(ops.assign, self.gradients, sums)
        else:
            done = self.map(ops.assign_add, self.gradients, gradients)
        loss = ops.depend(loss, done)
        return ops.assign_add(self.loss, loss), ops.assign_add(self.tokens, tokens)


class ApplyAccumulated(nn.Cell):
    """Ends a global batch: applies the accumulated gradients and clears them. Outputs as ``TrainStep``.

    ``several``: sum over the processes of the job first.
    """

    def __init__(
        self,
        accumulate: AccumulateStep,
        optimizer: nn.Cell,
        max_grad_norm: float | None,
        several: bool = False,
        watch: nn.Cell | None = None,
    ) -> None:
        super().__init__(auto_prefix=False)
        self.gradients = accumulate.gradients
        self.loss = accumulate.loss
        self.tokens = accumulate.tokens
        self.positions = float(accumulate.positions)
        self.sum_over_ranks = SumOverRanks(optimizer.parameters) if several else None
        self.update = ApplyGradients(optimizer, max_grad_norm, LocalNorm(), watch)
        self.map = ops.HyperMap()

    def construct(self, rate, scale, norm_limit=None, loss_limit=None, *group_rates):
        loss, tokens, gradients = self.loss * 1.0, self.tokens * 1.0, self.gradients
        if self.sum_over_ranks is not None:
            loss, tokens, gradients = self.sum_over_ranks(loss, tokens, gradients)
        loss = loss / tokens
        unscale = self.positions / (scale * tokens)
        rates = (rate, *group_rates) if group_rates else rate
        updated = self.update(gradients, unscale, rates, loss, norm_limit, loss_limit)
        loss = ops.depend(loss, updated[0])
        if len(updated) > 2:
            loss = ops.depend(loss, updated[2])
        cleared = self.map(ops.partial(clear, loss), (*self.gradients, self.loss, self.tokens))
        return (ops.depend(loss, cleared), updated[0], updated[1], tokens, *updated[2:])


clear = ops.MultitypeFuncGraph("clear")


@clear.register("Tensor", "Tensor")
def _clear(after, accumulator):
    return ops.assign(accumulator, ops.depend(ops.zeros_like(accumulator), after))
