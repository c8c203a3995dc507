"""A decoder with its language-model head: training loss and logits from the same weights."""

from __future__ import annotations

import mindspore as ms
from mindspore import Tensor, nn
from mindspore import ops as P

from mindllm.config import ModelConfig
from mindllm.config.architecture import HeadSpec
from mindllm.models.chunked_loss import TokenLosses, in_chunks
from mindllm.models.decoder import Decoder
from mindllm.models.kernels import Kernels
from mindllm.models.linear import Operand, SoftCap
from mindllm.models.loss import CpuCrossEntropy, CrossEntropy
from mindllm.models.weights import normal_parameter


class Head(nn.Cell):
    """Hidden states ``[tokens, hidden]`` and weight ``[vocab, hidden]`` -> logits ``[tokens, vocab]``, bounded by a soft cap."""

    def __init__(self, spec: HeadSpec, kernels: Kernels) -> None:
        super().__init__()
        self.matmul = P.MatMul(transpose_b=True)
        self.operand = Operand(kernels)
        self.capped = spec.soft_cap is not None
        if spec.soft_cap is not None:
            self.soft_cap = SoftCap(spec.soft_cap)
            self.cast = P.Cast()

    def construct(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return self.bounded(self.matmul(self.operand(hidden), self.operand(weight)))

    def bounded(self, logits: Tensor) -> Tensor:
        """The logits under the soft cap, in fp32; as they are without one."""
        return self.soft_cap(self.cast(logits, ms.float32)) if self.capped else logits


class UnitRows(nn.Cell):
    """``weight / |weight|`` row by row, ``[vocab, hidden]``: the head of Baichuan 2, in fp32."""

    SHORTEST = 1e-12

    def __init__(self) -> None:
        super().__init__()
        self.square = P.Square()
        self.sum = P.ReduceSum(keep_dims=True)
        self.maximum = P.Maximum()
        self.rsqrt = P.Rsqrt()
        self.mul = P.Mul()

    def construct(self, weight: Tensor) -> Tensor:
        lengths = self.maximum(self.sum(self.square(weight), -1), self.SHORTEST**2)
        return self.mul(weight, self.rsqrt(lengths))


class CausalLM(nn.Cell):
    """``model`` (the decoder), ``lm_head`` and the loss.

    With a tied head it multiplies by the embedding and ``lm_head.weight`` does not exist.
    """

    def __init__(self, config: ModelConfig, kernels: Kernels) -> None:
        super().__init__()
        self.model = Decoder(config, kernels)
        head = config.architecture.head
        self.tied = head.tied
        self.normalised = head.normalised
        if head.normalised:
            self.unit_rows = UnitRows()
        self.lm_head = Head(head, kernels)
        self.cross_entropy = CpuCrossEntropy(config.vocab_size) if kernels.cpu else CrossEntropy(config.vocab_size)
        self.losses = in_chunks(TokenLosses(self.lm_head, self.cross_entropy), config, kernels)
        if not self.tied:  # the last, or the cell above would rename it
            shape = (config.vocab_size, config.hidden_size)
            self.lm_head.weight = normal_parameter("lm_head.weight", shape, config.initializer_range)
        self.reshape = P.Reshape()
        self.mul = P.Mul()
        self.sum = P.ReduceSum()
        if self.model.adds_to_loss:
            self.cast = P.Cast()
            self.tokens_of_rows = P.ReduceSum(keep_dims=True)
            self.balance_mul = P.Mul()
            self.balance_sum = P.ReduceSum()
            self.add_balance = P.Add()

    def head_weight(self) -> Tensor:
        """What hidden states are multiplied with, ``[vocab, hidden]``."""
        weight = self.model.tok_embeddings.embedding_weight if self.tied else self.lm_head.weight
        return self.unit_rows(weight) if self.normalised else weight

    def logits(self, hidden: Tensor) -> Tensor:
        """``[tokens, hidden] -> [tokens, vocab]``."""
        return self.lm_head(hidden, self.head_weight())

    def construct(
        self,
        input_ids: Tensor,
        labels: Tensor,
        loss_mask: Tensor,
        segment_starts: Tensor | None = None,
        position_ids: Tensor | None = None,
        random: Tensor | None = None,
    ) -> Tensor:
        """All inputs ``[batch, seq]``; returns the loss, a scalar in nats: that of tokens whose mask is 1, and what layers add
        to the mean loss of a sequence times the number of its tokens.

        What the last three are is said at :class:`Decoder`; the first two of them need ``kernels.document_masks``.
        """
        decoded = self.model(input_ids, segment_starts, position_ids, random)
        hidden = decoded[0] if self.model.adds_to_loss else decoded
        losses = self.losses(hidden, self.head_weight(), self.reshape(labels, (-1,)))
        loss = self.sum(self.mul(losses, self.reshape(loss_mask, (-1,))))
        if not self.model.adds_to_loss:
            return loss
        tokens = self.reshape(self.tokens_of_rows(self.cast(loss_mask, ms.float32), 1), (-1,))
        return self.add_balance(loss, self.balance_sum(self.balance_mul(decoded[1], tokens)))


def build_model(config: ModelConfig, device_target: str = "CPU") -> CausalLM:
    """Builds the model a configuration describes, written with the operators of ``device_target``."""
    return CausalLM(config, Kernels.choose(config, device_target))
