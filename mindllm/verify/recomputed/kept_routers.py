"""What the routers of a single device made in a step: logits, choices, weights of experts, and what each adds to the loss.

Layers pass on the sum of what they add to the loss. Here they pass on a place for each layer in its stead, in the shape
``[rows, layers, 1 + 3 · seq · experts]``: what the router adds, its logits, its choices, their weights. A layer moves all places
one further and writes the last one, so the shape is the same for all layers, and those that are alike are still compiled once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn
from mindspore import ops as P

from mindllm.models import CausalLM

OF_TOKENS = 3  # logits, choices and weights of each expert


@dataclass(frozen=True)
class RouterValues:
    """Of the routers of a step, in the order of their layers: what each adds to the mean loss of a row ``[parts, layers, rows]``,
    logits, choices (1 where a token chose an expert) and the weights of those ``[parts, layers, rows, seq, experts]``; all fp32.
    """

    added: np.ndarray
    logits: np.ndarray
    choices: np.ndarray
    weights: np.ndarray


def balancing_layers(lm: CausalLM) -> list[nn.Cell]:
    """The layers whose routers add to the loss."""
    return [layer for layer in lm.model.layers if layer.adds_to_loss and layer.feed_forward.balances]


class KeepingBalance(nn.Cell):
    """What a router adds to the loss, with what it was made from: ``[rows, 1, 1 + 2 · seq · experts]``."""

    def __init__(self, balance: nn.Cell, rows: int) -> None:
        super().__init__(auto_prefix=False)
        self.balance = balance
        self.ones = Tensor(np.ones(rows, np.float32))
        self.rows = rows
        self.mul, self.reshape, self.join = P.Mul(), P.Reshape(), P.Concat(axis=2)

    def construct(self, logits: Tensor, scores: Tensor, mask: Tensor) -> Tensor:
        added = self.mul(self.balance(logits, scores, mask), self.ones)  # one number is that of all rows
        made = (added, P.stop_gradient(logits), P.stop_gradient(mask))
        return self.join([self.reshape(one, (self.rows, 1, -1)) for one in made])


class KeepingRouter(nn.Cell):
    """A router whose balance keeps what it was made from, and that adds the weights of the chosen experts to it."""

    def __init__(self, router: nn.Cell, rows: int) -> None:
        super().__init__(auto_prefix=False)
        self.router = router
        self.experts, self.rows = router.experts, rows
        self.onehot, self.mul, self.sum = P.OneHot(), P.Mul(), P.ReduceSum()
        self.reshape, self.join = P.Reshape(), P.Concat(axis=2)
        self.on, self.off = Tensor(1.0, ms.float32), Tensor(0.0, ms.float32)

    def construct(self, x: Tensor, batch: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        chosen, weights, mask, added = self.router(x, batch)
        places = self.onehot(chosen, self.experts, self.on, self.off)
        of_experts = self.sum(self.mul(places, self.reshape(weights, (*weights.shape, 1))), 2)
        kept = self.reshape(P.stop_gradient(of_experts), (self.rows, 1, -1))
        return chosen, weights, mask, self.join((added, kept))


class AddToOwn(nn.Cell):
    """Adds the counter's zeros ``[rows]`` to what a router adds, and puts that behind the places of other layers."""

    def __init__(self, rows: int, layers: int, size: int) -> None:
        super().__init__(auto_prefix=False)
        self.others = Tensor(np.zeros((rows, layers - 1, size), np.float32)) if layers > 1 else None
        self.first = Tensor(np.eye(1, size, dtype=np.float32).reshape(1, 1, size))
        self.rows = rows
        self.add, self.mul, self.reshape, self.join = P.Add(), P.Mul(), P.Reshape(), P.Concat(axis=1)

    def construct(self, own: Tensor, counted: Tensor) -> Tensor:
        own = self.add(own, self.mul(self.reshape(counted, (self.rows, 1, 1)), self.first))
        return own if self.others is None else self.join((self.others, own))


class MoveUp(nn.Cell):
    """Places of the layers before, and those of a layer, which has the last one -> all, its own behind the others."""

    def __init__(self, rows: int, layers: int, size: int) -> None:
        super().__init__(auto_prefix=False)
        self.others, self.one = (rows, layers - 1, size), (rows, 1, size)
        self.second, self.last = (0, 1, 0), (0, layers - 1, 0)
        self.slice, self.join = P.Slice(), P.Concat(axis=1)

    def construct(self, added: Tensor, own: Tensor) -> Tensor:
        return self.join((self.slice(added, self.second, self.others), self.slice(own, self.last, self.one)))


class OwnSums(nn.Cell):
    """Keeps the places of all layers, and hands on the sum of what they add, ``[rows]``, to be multiplied."""

    def __init__(self, kept: nn.Cell, product: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.kept, self.product = kept, product
        self.sum = P.ReduceSum()

    def construct(self, added: Tensor, tokens: Tensor) -> Tensor:
        return self.product(self.sum(self.kept(added)[:, :, 0], 1), tokens)


class RouterKeeper:
    """Makes ``layers`` pass on what their routers make of ``rows`` sequences of ``length`` tokens."""

    def __init__(self, layers: Sequence[nn.Cell], rows: int, length: int) -> None:
        self.rows, self.length, self.experts = rows, length, layers[0].feed_forward.router.experts
        self.shape = (rows, len(layers), 1 + OF_TOKENS * length * self.experts)
        for layer in layers:
            router = layer.feed_forward.router
            _exchange(router, "balance", KeepingBalance(router.balance, rows))
            _exchange(layer.feed_forward, "router", KeepingRouter(router, rows))
            layer.feed_forward.add_load = AddToOwn(*self.shape)
            layer.add_to_loss = MoveUp(*self.shape)

    def values(self, kept: np.ndarray) -> RouterValues:
        """``kept``: the places, ``[parts, *shape]``."""
        places = kept.swapaxes(1, 2)
        made = places[..., 1:].reshape(*places.shape[:3], OF_TOKENS, self.length, self.experts)
        return RouterValues(places[..., 0].copy(), *(made[:, :, :, one].copy() for one in range(OF_TOKENS)))


def _exchange(cell: nn.Cell, name: str, child: nn.Cell) -> None:
    """Sets a child in place of one it holds: parameters inside keep their names, which an assignment would change."""
    delattr(cell, name)
    cell.insert_child_to_cell(name, child)
