"""A decoder with its language-model head: training loss and logits from the same weights."""

from __future__ import annotations

from mindspore import Tensor, nn
from mindspore import ops as P

from mindllm.config import ModelConfig
from mindllm.models.chunked_loss import TokenLosses, in_chunks
from mindllm.models.decoder import Decoder
from mindllm.models.kernels import Kernels
from mindllm.models.linear import Operand
from mindllm.models.loss import CpuCrossEntropy, CrossEntropy
from mindllm.models.weights import normal_parameter


class Head(nn.Cell):
    """Hidden states ``[tokens, hidden]`` and weight ``[vocab, hidden]`` -> logits ``[tokens, vocab]``."""

    def __init__(self, kernels: Kernels) -> None:
        super().__init__()
        self.matmul = P.MatMul(transpose_b=True)
        self.operand = Operand(kernels)

    def construct(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return self.matmul(self.operand(hidden), self.operand(weight))


class CausalLM(nn.Cell):
    """``model`` (the decoder), ``lm_head`` and the loss.

    With ``tie_word_embeddings`` the head multiplies by the embedding and ``lm_head.weight`` does not exist.
    """

    def __init__(self, config: ModelConfig, kernels: Kernels) -> None:
        super().__init__()
        self.model = Decoder(config, kernels)
        self.tied = config.tie_word_embeddings
        self.lm_head = Head(kernels)
        self.cross_entropy = CpuCrossEntropy(config.vocab_size) if kernels.cpu else CrossEntropy(config.vocab_size)
        self.losses = in_chunks(TokenLosses(self.lm_head, self.cross_entropy), config, kernels)
        if not self.tied:  # the last, or the cell above would rename it
            shape = (config.vocab_size, config.hidden_size)
            self.lm_head.weight = normal_parameter("lm_head.weight", shape, config.initializer_range)
        self.reshape = P.Reshape()
        self.mul = P.Mul()
        self.sum = P.ReduceSum()

    def head_weight(self) -> Tensor:
        return self.model.tok_embeddings.embedding_weight if self.tied else self.lm_head.weight

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
    ) -> Tensor:
        """All inputs ``[batch, seq]``; returns the loss summed over the tokens whose mask is 1: a scalar, nats.

        What the last two are is said at :class:`Decoder`; they need ``kernels.document_masks``.
        """
        hidden = self.model(input_ids, segment_starts, position_ids)
        losses = self.losses(hidden, self.head_weight(), self.reshape(labels, (-1,)))
        return self.sum(self.mul(losses, self.reshape(loss_mask, (-1,))))


def build_model(config: ModelConfig, device_target: str = "CPU") -> CausalLM:
    """Builds the model a configuration describes, written with the operators of ``device_target``."""
    return CausalLM(config, Kernels.choose(config, device_target))
