"""Multi-token prediction (DeepSeek-V3, section 2.2): layers after the decoder, each for one more token ahead.

Layer ``k`` (1, 2, …) sees at position ``i`` the hidden states of the layer before it, or of the decoder after its final norm,
and the embedding of token ``i + k``. It predicts token ``i + k + 1``. Embedding and head are those of the
model.
"""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn
from mindspore import ops as P
from mindspore.common.initializer import initializer

from mindllm.architecture.layer import LayerSpec
from mindllm.models.attention.attention import Tables
from mindllm.models.decoder_layer import DecoderLayer
from mindllm.models.kernels import Kernels
from mindllm.models.linear import Linear
from mindllm.models.norm import make_norm
from mindllm.models.weights import InitStd


class MTPLayer(DecoderLayer):
    """A decoder layer with norms and a projection of its inputs before it, and a norm after it.

    ``[batch · seq, hidden]`` hidden states and embeddings of the tokens to come -> hidden states after the norm, in the dtype of
    activations, and the added loss as in :class:`DecoderLayer`.
    """

    def __init__(self, spec: LayerSpec, kernels: Kernels, spread: InitStd, seq_length: int) -> None:
        super().__init__(spec, kernels, spread, seq_length)
        hidden = spec.attention.hidden_size
        self.enorm = make_norm(hidden, spec.norm, kernels)
        self.hnorm = make_norm(hidden, spec.norm, kernels)
        self.join = P.Concat(axis=1)
        self.eh_proj = Linear(2 * hidden, hidden, kernels, spread.inner)
        self.final_norm = make_norm(hidden, spec.norm, kernels)

    def construct(
        self,
        x: Tensor,
        batch: int,
        tables: Tables,
        mask: Tensor,
        added: Tensor | None = None,
        random: Tensor | None = None,
        embeddings: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Compute the layer. Arguments are those of :class:`DecoderLayer`; ``embeddings`` are required."""
        x = self.widened(self.eh_proj(self.join((self.enorm(embeddings), self.hnorm(x)))))
        if not self.adds_to_loss:
            return self.final_norm(super().construct(x, batch, tables, mask, added, random))
        x, added = super().construct(x, batch, tables, mask, added, random)
        return self.final_norm(x), added


class TokenShift(nn.Cell):
    """Shifts columns ``[batch, seq]`` by ``depth`` tokens: position ``i`` gets the value at ``i + depth``.

    The last ``depth`` positions, which have no such token, get the last value. ``positions`` are those of tokens in their order,
    int ``[seq]``; ``documents``: rows have several of them. Each column has its own operator: a function that is called twice is
    split over devices twice (MindSpore 2.10).
    """

    def __init__(self, depth: int, positions: np.ndarray, documents: bool) -> None:
        super().__init__()
        length = len(positions)
        places = np.argsort(positions).astype(np.int32)
        self.places = Tensor(places[np.minimum(positions + depth, length - 1)])
        self.exists = Tensor((positions + depth < length).astype(np.float32).reshape(1, length))
        self.gather = P.Gather()
        self.gather_labels = P.Gather()
        self.gather_mask = P.Gather()
        self.there = P.Mul()
        self.documents = documents
        if documents:
            self.gather_starts = P.Gather()
            self.same_document = P.Equal()
            self.inside = P.Mul()
        self.cast = P.Cast()

    def construct(self, tokens: Tensor) -> Tensor:
        return self.gather(tokens, self.places, 1)

    def labels(self, labels: Tensor) -> Tensor:
        """Return the labels of the layer."""
        return self.gather_labels(labels, self.places, 1)

    def mask(self, loss_mask: Tensor, segment_starts: Tensor | None) -> Tensor:
        """Return the mask of predictions, fp32: the token exists, counts, and is in the document of its position."""
        mask = self.there(self.cast(self.gather_mask(loss_mask, self.places, 1), ms.float32), self.exists)
        if segment_starts is None or not self.documents:
            return mask
        in_document = self.same_document(self.gather_starts(segment_starts, self.places, 1), segment_starts)
        return self.inside(mask, self.cast(in_document, ms.float32))


class PredictionLoss(nn.Cell):
    """Losses and mask of the tokens that one layer predicts, both ``[batch · seq]`` -> their sum times ``factor``.

    The gradient of ``probe``, a weight that is always zero, has the sum and the number of these tokens
    (:mod:`mindllm.models.experts.expert_load`).
    """

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor
        self.probe = Parameter(initializer("zeros", (2,), ms.float32), name="probe")
        self.mul = P.Mul()
        self.sum = P.ReduceSum()
        self.scale = P.Mul()
        self.tokens = P.ReduceSum()
        self.join = P.Concat()
        self.reshape = P.Reshape()
        self.weigh = P.Mul()
        self.probe_sum = P.ReduceSum()
        self.add = P.Add()

    def construct(self, losses: Tensor, mask: Tensor) -> Tensor:
        loss = self.sum(self.mul(losses, mask))
        sums = (self.reshape(loss, (1,)), self.reshape(self.tokens(mask), (1,)))
        counted = P.stop_gradient(self.join(sums))
        return self.add(self.scale(loss, self.factor), self.probe_sum(self.weigh(counted, self.probe)))
