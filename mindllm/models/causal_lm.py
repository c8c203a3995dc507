"""A decoder with its language-model head: training loss and logits from the same weights."""

from __future__ import annotations

import mindspore as ms
from mindspore import Tensor, nn
from mindspore import ops as P

from mindllm.architecture.decoder import HeadSpec
from mindllm.config import ModelConfig
from mindllm.models.decoder import Decoder
from mindllm.models.kernels import Kernels
from mindllm.models.linear import Operand, SoftCap
from mindllm.models.loss import CpuCrossEntropy, CrossEntropy, TokenLosses, in_chunks
from mindllm.models.mtp import PredictionLoss, TokenShift
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
        hidden = self.operand(hidden)
        return self.bounded(self.matmul(hidden, self.operand.of_weight(weight, hidden)))

    def bounded(self, logits: Tensor) -> Tensor:
        """Return the logits under the soft cap in fp32, or unchanged without one."""
        return self.soft_cap(self.cast(logits, ms.float32)) if self.capped else logits


class UnitRows(nn.Cell):
    """``weight / |weight|`` row by row, ``[vocab, hidden]``: the head of Baichuan 2, in fp32."""

    SHORTEST = 1e-12

    def __init__(self, kernels: Kernels) -> None:
        super().__init__()
        self.widens = kernels.weights.stored != ms.float32
        if self.widens:
            self.cast = P.Cast()
        self.square = P.Square()
        self.sum = P.ReduceSum(keep_dims=True)
        self.maximum = P.Maximum()
        self.rsqrt = P.Rsqrt()
        self.mul = P.Mul()

    def construct(self, weight: Tensor) -> Tensor:
        if self.widens:
            weight = self.cast(weight, ms.float32)
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
            self.unit_rows = UnitRows(kernels)
        self.lm_head = Head(head, kernels)
        self.cross_entropy = CpuCrossEntropy(config.vocab_size) if kernels.cpu else CrossEntropy(config.vocab_size)
        self.losses = in_chunks(TokenLosses(self.lm_head, self.cross_entropy), config, kernels)
        if not self.tied:  # the last, or the cell above would rename it
            shape = (config.vocab_size, config.hidden_size)
            self.lm_head.weight = normal_parameter("lm_head.weight", shape, config.initializer_range, kernels.weights)
        self.reshape = P.Reshape()
        self.mul = P.Mul()
        self.sum = P.ReduceSum()
        depths = range(config.num_nextn_predict_layers)
        self.has_mtp = bool(depths)
        if self.has_mtp:
            factor = config.mtp_loss_factor / len(depths)
            positions = kernels.positions(config.seq_length)
            self.ahead = nn.CellList([TokenShift(depth + 1, positions, kernels.document_masks) for depth in depths])
            self.prediction_losses = nn.CellList([PredictionLoss(factor) for _ in depths])
            self.add_prediction = P.Add()
        self.adds_balance = any(layer.adds_to_loss for layer in config.architecture.layers)
        if self.adds_balance:
            self.cast = P.Cast()
            self.tokens_of_rows = P.ReduceSum(keep_dims=True)
            self.balance_mul = P.Mul()
            self.balance_sum = P.ReduceSum()
            self.add_balance = P.Add()

    def head_weight(self) -> Tensor:
        """Return the weight that multiplies hidden states, ``[vocab, hidden]``."""
        weight = self.model.tok_embeddings.embedding_weight if self.tied else self.lm_head.weight
        return self.unit_rows(weight) if self.normalised else weight

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute logits: ``[tokens, hidden] -> [tokens, vocab]``."""
        return self.lm_head(hidden, self.head_weight())

    def construct(self, input_ids: Tensor, labels: Tensor, loss_mask: Tensor, *columns: Tensor | None) -> Tensor:
        """Return the loss, a scalar in nats: the sum over tokens whose mask is 1, the losses that layers add per sequence times
        the number of its tokens, and the mean loss of prediction layers times their factor.

        All inputs are ``[batch, seq]``. ``columns`` are the optional ones of :class:`Decoder`: ``segment_starts``,
        ``position_ids``, ``random`` and ``piece``. The first two require ``kernels.document_masks``, the last one
        ``kernels.pieces``: then all inputs are those of a piece, ``[batch, seq / pieces]``.
        """
        if not self.has_mtp:
            return self.next_token_loss(input_ids, labels, loss_mask, *columns)
        ids: tuple[Tensor, ...] = ()
        for shift in self.ahead:
            ids = (*ids, shift(input_ids))
        states, added = self.model(input_ids, ids, *columns)
        segment_starts = columns[0] if len(columns) > 0 else None
        weight = self.head_weight()
        loss = self.masked(self.losses(states[0], weight, self.reshape(labels, (-1,))), loss_mask)
        for index, shift in enumerate(self.ahead):
            losses = self.losses(states[index + 1], weight, self.reshape(shift.labels(labels), (-1,)))
            mask = self.reshape(shift.mask(loss_mask, segment_starts), (-1,))
            loss = self.add_prediction(loss, self.prediction_losses[index](losses, mask))
        return loss if added is None else self.balanced(loss, added, loss_mask)

    def next_token_loss(self, input_ids: Tensor, labels: Tensor, loss_mask: Tensor, *columns: Tensor | None) -> Tensor:
        """Return the loss without prediction layers, by which models are evaluated."""
        decoded = self.model(input_ids, None, *columns)
        hidden = decoded[0] if self.model.adds_to_loss else decoded
        loss = self.masked(self.losses(hidden, self.head_weight(), self.reshape(labels, (-1,))), loss_mask)
        return self.balanced(loss, decoded[1], loss_mask) if self.model.adds_to_loss else loss

    def masked(self, losses: Tensor, loss_mask: Tensor) -> Tensor:
        """Return the sum of the losses of tokens whose mask is 1."""
        return self.sum(self.mul(losses, self.reshape(loss_mask, (-1,))))

    def balanced(self, loss: Tensor, added: Tensor, loss_mask: Tensor) -> Tensor:
        """Return ``loss`` plus the losses that layers add per sequence, times the number of its tokens."""
        tokens = self.reshape(self.tokens_of_rows(self.cast(loss_mask, ms.float32), 1), (-1,))
        return self.add_balance(loss, self.balance_sum(self.balance_mul(added, tokens)))


class NextTokenLoss(nn.Cell):
    """The loss of a model without its prediction layers. Inputs are those of :class:`CausalLM`."""

    def __init__(self, lm: CausalLM) -> None:
        super().__init__(auto_prefix=False)
        self.lm = lm

    def construct(self, input_ids: Tensor, labels: Tensor, loss_mask: Tensor, *further: Tensor | None) -> Tensor:
        return self.lm.next_token_loss(input_ids, labels, loss_mask, *further)


def for_evaluation(cell: nn.Cell) -> nn.Cell:
    """Return the cell for evaluation in place of one with a loss. Prediction layers are left out."""
    return NextTokenLoss(cell) if isinstance(cell, CausalLM) and cell.has_mtp else cell


def build_model(config: ModelConfig, device_target: str = "CPU") -> CausalLM:
    """Build the model of a configuration with the operators of ``device_target``."""
    return CausalLM(config, Kernels.choose(config, device_target))
