"""Next-token cross entropy in fp32: a form whose vocabulary can be split over devices, and one for a CPU."""

from __future__ import annotations

import mindspore as ms
from mindspore import Tensor, nn, ops
from mindspore import ops as P

from mindllm.config import ModelConfig
from mindllm.models.kernels import Kernels
from mindllm.models.linear import Operand

# Cross entropy in slices of the sequence: the logits of one slice exist at a time and are computed again for the gradient.
#
# With large vocabularies the logits are the largest tensor of a model. Recomputing them costs one more product with the head's
# weight (recomputation: Chen et al., 2016).


class TokenLosses(nn.Cell):
    """Hidden states ``[tokens, hidden]``, weight of the head, labels ``[tokens]`` -> loss of each token ``[tokens]``."""

    def __init__(self, head: nn.Cell, cross_entropy: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.head = head
        self.cross_entropy = cross_entropy

    def construct(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return self.cross_entropy(self.head(hidden, weight), labels)[0]


class Turn(nn.Cell):
    """Orders slices: the next one starts after this one's losses, and backward this one's gradient starts after that of the next
    one's hidden states. Both inputs pass through unchanged.

    Recomputation waits for the gradient of its result. Without an order the gradients of all losses are available together, and a
    device recomputes the logits of all slices before it finishes one.
    """

    def construct(self, losses: Tensor, following: Tensor) -> tuple[Tensor, Tensor]:
        return losses, ops.depend(following, losses)

    def bprop(
        self, losses: Tensor, following: Tensor, out: tuple[Tensor, Tensor], dout: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        return ops.depend(dout[0], dout[1]), dout[1]


class SequenceChunks(nn.Cell):
    """``losses`` over slices along the sequence one after another, by the compiler's recomputation. Where ``ranks`` devices
    share a sequence, a slice has a part of what each of them holds.
    """

    def __init__(self, losses: nn.Cell, model: ModelConfig, ranks: int = 1) -> None:
        super().__init__(auto_prefix=False)
        self.losses = losses
        self.losses.recompute()
        self.turn = Turn()
        self.chunks = model.loss_chunks
        self.hidden_size = model.hidden_size
        self.length = model.seq_length // ranks
        self.around = (-1,) if ranks == 1 else (-1, ranks)
        axis = len(self.around)
        self.split_hidden = P.Split(axis=axis, output_num=self.chunks)
        self.split_labels = P.Split(axis=axis, output_num=self.chunks)
        self.concat = P.Concat(axis=axis)
        self.reshape = P.Reshape()

    def construct(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        slices = self.split_hidden(self.reshape(hidden, (*self.around, self.length, self.hidden_size)))
        labels = self.split_labels(self.reshape(labels, (*self.around, self.length)))
        parts: tuple[Tensor, ...] = ()
        losses = self.slice_losses(slices[0], weight, labels[0])
        for index in range(1, self.chunks):
            losses, following = self.turn(losses, slices[index])
            parts = (*parts, losses)
            losses = self.slice_losses(following, weight, labels[index])
        return self.reshape(self.concat((*parts, losses)), (-1,))

    def slice_losses(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        """Return the losses of one slice, in its shape."""
        losses = self.losses(self.reshape(hidden, (-1, self.hidden_size)), weight, self.reshape(labels, (-1,)))
        return self.reshape(losses, (*self.around, self.length // self.chunks))


class OrderedChunks(nn.Cell):
    """Token losses on a CPU over slices of the tokens, forward and backward one after another.

    The CPU back end starts every operator with complete inputs, so that the compiler would recompute the logits of all slices
    together. Here each slice waits for the previous one.
    """

    def __init__(self, losses: TokenLosses, chunks: int, kernels: Kernels) -> None:
        super().__init__(auto_prefix=False)
        self.losses = losses
        self.chunks = chunks
        self.operand = Operand(kernels)
        self.hidden_gradient = P.MatMul()
        self.weight_gradient = P.MatMul(transpose_a=True)
        self.slice = P.Slice()
        self.concat = P.Concat(axis=0)
        self.cast = P.Cast()
        self.zeros_like = P.ZerosLike()
        self.square = P.Square()

    def construct(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        parts: tuple[Tensor, ...] = (self.losses(self.rows(hidden, 0), weight, self.rows(labels, 0)),)
        for index in range(1, self.chunks):
            hidden = ops.depend(hidden, parts[-1])
            parts = (*parts, self.losses(self.rows(hidden, index), weight, self.rows(labels, index)))
        return self.concat(parts)

    def bprop(
        self, hidden: Tensor, weight: Tensor, labels: Tensor, out: Tensor, dout: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        weight = self.operand(weight)
        part, total = self.gradients(hidden, weight, labels, dout, 0)
        parts: tuple[Tensor, ...] = (part,)
        for index in range(1, self.chunks):
            part, product = self.gradients(ops.depend(hidden, total), weight, labels, dout, index)
            parts = (*parts, part)
            total = total + product
        return self.concat(parts), total, self.zeros_like(labels)

    def gradients(
        self, hidden: Tensor, weight: Tensor, labels: Tensor, dout: Tensor, index: int
    ) -> tuple[Tensor, Tensor]:
        """Return one slice's gradient of its hidden states and its part of the weight's."""
        rows = self.operand(self.rows(hidden, index))
        head = self.losses.head
        logits = head.bounded(head.matmul(rows, weight))
        gradient = self.losses.cross_entropy.gradient(logits, self.rows(labels, index), self.rows(dout, index))
        if head.capped:  # of cap · tanh(x / cap): 1 - tanh²
            gradient = self.cast(gradient * (1.0 - self.square(logits * (1.0 / head.soft_cap.cap))), rows.dtype)
        hidden_gradient, weight_gradient = self.hidden_gradient(gradient, weight), self.weight_gradient(gradient, rows)
        return self.operand(hidden_gradient), self.cast(self.operand(weight_gradient), ms.float32)

    def rows(self, x: Tensor, index: int) -> Tensor:
        """Slice ``index`` of the first dimension."""
        start, end = x.shape[0] * index // self.chunks, x.shape[0] * (index + 1) // self.chunks
        if x.ndim == 1:
            return self.slice(x, (start,), (end - start,))
        return self.slice(x, (start, 0), (end - start, x.shape[1]))


def in_chunks(losses: TokenLosses, model: ModelConfig, kernels: Kernels) -> nn.Cell:
    """``losses`` in ``model.loss_chunks`` slices, in the form the device is good at."""
    if model.loss_chunks == 1:
        return losses
    return (
        OrderedChunks(losses, model.loss_chunks, kernels)
        if kernels.cpu
        else SequenceChunks(losses, model, kernels.sequence_ranks)
    )


class CrossEntropy(nn.Cell):
    """Logits ``[tokens, vocab]`` and labels ``[tokens]`` -> loss of each token ``[tokens]``, nats, and what its gradient reads.

    Written with reductions over the vocabulary axis, which the parallel compiler can split over devices
    (vocabulary-parallel; Shoeybi et al., 2019, section 3). The gradient is written out, for three tensors of the size of the
    logits at a time: the one that the compiler derives needs four.

    Attributes:
        vocabulary_ranks: number of devices that the vocabulary is split over. Each of them computes the losses, so the compiler
            divides their gradient by this number. A derived gradient is summed again by the AllReduce of the reductions.
    """

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.vocabulary_ranks = 1
        self.cast = P.Cast()
        self.max = P.ReduceMax(keep_dims=True)
        self.sub = P.Sub()
        self.exp = P.Exp()
        self.sum = P.ReduceSum()
        self.log = P.Log()
        self.onehot = P.OneHot()
        self.mul = P.Mul()
        self.target_sum = P.ReduceSum()
        self.loss = P.Sub()
        self.reshape = P.Reshape()
        self.on = Tensor(1.0, ms.float32)
        self.off = Tensor(0.0, ms.float32)

    def construct(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return losses, shifted logits, the one-hot labels and the logarithm of the normalizer."""
        logits = self.cast(logits, ms.float32)
        shifted = self.sub(logits, self.max(logits, -1))
        log_normalizer = self.log(self.sum(self.exp(shifted), -1))
        # Labels depend on the normalizer, so that they follow the exponentials, which are gone then.
        target = self.onehot(ops.depend(labels, log_normalizer), self.vocab_size, self.on, self.off)
        losses = self.loss(log_normalizer, self.target_sum(self.mul(shifted, target), -1))
        return losses, shifted, target, log_normalizer

    def bprop(
        self,
        logits: Tensor,
        labels: Tensor,
        out: tuple[Tensor, Tensor, Tensor, Tensor],
        dout: tuple[Tensor, Tensor, Tensor, Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Return ``softmax - onehot(label)``, weighted by the gradient of the loss.

        The one-hot labels come from the forward pass: there each device has those of its part of the vocabulary.
        """
        losses, shifted, target, log_normalizer = out
        # The gradient needs no loss. Without the order a device may make it before the loss, next to what the loss still reads.
        log_normalizer = ops.depend(log_normalizer, losses)
        softmax = ops.exp(shifted - self.reshape(log_normalizer, (-1, 1)))
        # All ranks of the vocabulary have the same gradient of the losses, so its sum over them is a product.
        weights = (
            ops.mul(dout[0], Tensor(float(self.vocabulary_ranks), ms.float32)) if self.vocabulary_ranks > 1 else dout[0]
        )
        gradient = (softmax - target) * self.reshape(weights, (-1, 1))
        return self.cast(gradient, logits.dtype), ops.zeros_like(labels)


class CpuCrossEntropy(nn.Cell):
    """As :class:`CrossEntropy`, from the softmax that the gradient needs anyway: half the passes and a third of the memory."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.with_softmax = LossAndSoftmax(vocab_size)
        self.cast = P.Cast()

    def construct(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return self.with_softmax(self.cast(logits, ms.float32), labels)

    def gradient(self, logits: Tensor, labels: Tensor, loss_gradient: Tensor) -> Tensor:
        """Return the gradient of ``logits``, in their dtype, for the gradient of the losses ``[tokens]``."""
        softmax = self.with_softmax.softmax(self.cast(logits, ms.float32))
        return self.cast(self.with_softmax.gradient(softmax, labels, loss_gradient), logits.dtype)


class LossAndSoftmax(nn.Cell):
    """fp32 logits ``[tokens, vocab]``, labels ``[tokens]`` -> loss ``[tokens]`` and softmax ``[tokens, vocab]``.

    With ``m`` the largest logit of a token, its softmax is ``1 / Σ exp(logit - m)``: the log of the normalizer is
    ``m - log softmax(m)`` and needs no additional exponential (that of a fused kernel has four correct digits).
    """

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.softmax = P.Softmax()
        self.zeros_like = P.ZerosLike()
        self.largest = P.ArgMaxWithValue(axis=-1, keep_dims=True)
        self.gather = P.GatherD()
        self.log = P.Log()
        self.onehot = P.OneHot()
        self.reshape = P.Reshape()
        self.on = Tensor(1.0, ms.float32)
        self.off = Tensor(0.0, ms.float32)

    def construct(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        softmax = self.softmax(logits)
        place, largest = self.largest(logits)
        log_normalizer = largest - self.log(self.gather(softmax, -1, place))
        target = self.gather(logits, -1, self.reshape(labels, (-1, 1)))
        return self.reshape(log_normalizer - target, (-1,)), softmax

    def bprop(
        self, logits: Tensor, labels: Tensor, out: tuple[Tensor, Tensor], dout: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        return self.gradient(out[1], labels, dout[0]), self.zeros_like(labels)

    def gradient(self, softmax: Tensor, labels: Tensor, loss_gradient: Tensor) -> Tensor:
        """``softmax - onehot(label)``, weighted by the gradient of the loss; nothing flows back through the softmax."""
        # Without the order the back end makes the one-hot matrix before anything else, and keeps it.
        labels = ops.depend(labels, softmax)
        target = self.onehot(labels, self.vocab_size, self.on, self.off)
        return (softmax - target) * self.reshape(loss_gradient, (-1, 1))
