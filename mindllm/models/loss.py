"""Next-token cross entropy in fp32: a form whose vocabulary can be split over devices, and one for a CPU."""

from __future__ import annotations

import mindspore as ms
from mindspore import Tensor, nn, ops
from mindspore import ops as P


class CrossEntropy(nn.Cell):
    """Logits ``[tokens, vocab]`` and labels ``[tokens]`` -> loss of each token ``[tokens]``, nats.

    Written with reductions over the vocabulary axis, which the parallel compiler can split over devices
    (vocabulary-parallel; Shoeybi et al., 2019, section 3).
    """

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size
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
        self.on = Tensor(1.0, ms.float32)
        self.off = Tensor(0.0, ms.float32)

    def construct(self, logits: Tensor, labels: Tensor) -> Tensor:
        logits = self.cast(logits, ms.float32)
        shifted = self.sub(logits, P.stop_gradient(self.max(logits, -1)))
        log_normaliser = self.log(self.sum(self.exp(shifted), -1))
        target = self.onehot(labels, self.vocab_size, self.on, self.off)
        return self.loss(log_normaliser, self.target_sum(self.mul(shifted, target), -1))


class CpuCrossEntropy(nn.Cell):
    """As :class:`CrossEntropy`, from the softmax that the gradient needs anyway: half the passes and a third of the memory."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.with_softmax = LossAndSoftmax(vocab_size)
        self.cast = P.Cast()

    def construct(self, logits: Tensor, labels: Tensor) -> Tensor:
        return self.with_softmax(self.cast(logits, ms.float32), labels)[0]

    def gradient(self, logits: Tensor, labels: Tensor, loss_gradient: Tensor) -> Tensor:
        """The gradient of ``logits``, in their dtype, for the gradient of the losses ``[tokens]``."""
        softmax = self.with_softmax.softmax(self.cast(logits, ms.float32))
        return self.cast(self.with_softmax.gradient(softmax, labels, loss_gradient), logits.dtype)


class LossAndSoftmax(nn.Cell):
    """fp32 logits ``[tokens, vocab]``, labels ``[tokens]`` -> loss ``[tokens]`` and softmax ``[tokens, vocab]``.

    With ``m`` the largest logit of a token, its softmax is ``1 / Σ exp(logit - m)``: the log of the normaliser is
    ``m - log softmax(m)``, and needs no exponential of its own (that of a fused kernel is good to four digits only).
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
        log_normaliser = largest - self.log(self.gather(softmax, -1, place))
        target = self.gather(logits, -1, self.reshape(labels, (-1, 1)))
        return self.reshape(log_normaliser - target, (-1,)), softmax

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
