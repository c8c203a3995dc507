"""What a step of the single device made on its way to the loss: hidden states before the head, logits, what layers add.

They are kept by assignments inside the compiled step, so nothing is compiled or computed for them once more. Of layers, which are
compiled once where they are alike, nothing can be kept so: with assignments in a router the step made no update (MindSpore 2.10).
What routers made goes from layer to layer in place of the sum of what they add (:mod:`mindllm.verify.recomputed.kept_routers`).
"""

from __future__ import annotations

from dataclasses import dataclass

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore import ops as P

from mindllm.config import RunConfig
from mindllm.models import CausalLM
from mindllm.models.weights import constant
from mindllm.verify.recomputed.kept_routers import OwnSums, RouterKeeper, RouterValues, balancing_layers


@dataclass(frozen=True)
class HeadValues:
    """What the head was given and gave, of every time it was used in a step: ``[parts, depths, tokens, hidden]`` and
    ``[parts, depths, tokens, vocab]``. Depth 0 is the next token, those behind it are of layers that predict ahead.
    """

    hidden: np.ndarray
    logits: np.ndarray


@dataclass(frozen=True)
class StepValues:
    """Of one step: the head's values, those of the reference that pairs of answers are compared with, what layers add to the
    mean loss of each row ``[rows]``, and what their routers made; None where there is no such thing.
    """

    policy: HeadValues
    reference: HeadValues | None = None
    added: np.ndarray | None = None
    routers: RouterValues | None = None


class Kept(nn.Cell):
    """Passes a tensor of this shape on, and keeps those of the last ``times`` calls in fp32, the latest last."""

    def __init__(self, name: str, times: int, shape: tuple[int, ...]) -> None:
        super().__init__(auto_prefix=False)
        self.values = constant(name, np.zeros((times, *shape), np.float32))
        self.row = (1, *shape)
        self.begins, self.rest = (1, *[0] * len(shape)), (times - 1, *shape)
        self.several = times > 1
        self.slice, self.concat = P.Slice(), P.Concat()
        self.reshape, self.cast = P.Reshape(), P.Cast()

    def construct(self, x: Tensor) -> Tensor:
        rows = self.reshape(self.cast(P.stop_gradient(x), ms.float32), self.row)
        if self.several:
            rows = self.concat((self.slice(self.values, self.begins, self.rest), rows))
        return ops.depend(x, ops.assign(self.values, rows))


class KeepingHead(nn.Cell):
    """A head that keeps the hidden states it is given and its logits."""

    def __init__(self, head: nn.Cell, hidden: Kept, logits: Kept) -> None:
        super().__init__(auto_prefix=False)
        self.head, self.hidden, self.logits = head, hidden, logits

    def construct(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return self.logits(self.head(self.hidden(hidden), weight))


class KeepingProduct(nn.Cell):
    """A product that keeps its first factor."""

    def __init__(self, kept: Kept) -> None:
        super().__init__(auto_prefix=False)
        self.kept = kept
        self.mul = P.Mul()

    def construct(self, first: Tensor, second: Tensor) -> Tensor:
        return self.mul(self.kept(first), second)


class ValueKeeper:
    """Keeps values of every step of a model that is not compiled yet, built for one device and with its loss in one piece."""

    def __init__(self, config: RunConfig, network: nn.Cell) -> None:
        self.parts = config.runner_config.gradient_accumulation_steps
        self.rows, self.model = config.runner_config.batch_size, config.model.config
        found = [cell for _, cell in network.cells_and_names() if isinstance(cell, CausalLM)]
        self.heads = [self._keep_head(number, lm) for number, lm in enumerate(found)]
        self.added: Kept | None = None
        self.routers: RouterKeeper | None = None
        if found[0].adds_balance:
            self.added = Kept("kept.added", self.parts, (self.rows,))
            product: nn.Cell = KeepingProduct(self.added)
            if len(found) == 1 and (layers := balancing_layers(found[0])):
                self.routers = RouterKeeper(layers, self.rows, self.model.seq_length)
                self.kept_routers = Kept("kept.routers", self.parts, self.routers.shape)
                product = OwnSums(self.kept_routers, product)
            found[0].balance_mul = product

    def _keep_head(self, number: int, lm: CausalLM) -> tuple[Kept, Kept]:
        tokens = self.rows * self.model.seq_length
        self.depths = 1 + (len(lm.ahead) if lm.has_mtp else 0)
        times = self.parts * self.depths
        hidden = Kept(f"kept.hidden.{number}", times, (tokens, self.model.hidden_size))
        logits = Kept(f"kept.logits.{number}", times, (tokens, self.model.vocab_size))
        lm.losses.head = KeepingHead(lm.lm_head, hidden, logits)
        return hidden, logits

    def values(self) -> StepValues:
        """Those of the last step."""
        heads = [HeadValues(*map(self._by_part, pair)) for pair in self.heads]
        added = None if self.added is None else self.added.values.asnumpy().reshape(-1)
        routers = None if self.routers is None else self.routers.values(self.kept_routers.values.asnumpy())
        return StepValues(heads[0], heads[1] if len(heads) > 1 else None, added, routers)

    def _by_part(self, kept: Kept) -> np.ndarray:
        values = kept.values.asnumpy()
        return values.reshape(self.parts, self.depths, *values.shape[1:]).copy()
