"""Record intermediate values in the compiled step of the single device: inputs of the head, logits, and results of routers.

The head's values are recorded by assignments inside the step, so that nothing is compiled or computed twice. Layers that are
equal are compiled once and cannot record in that way: with assignments in a router the step made no update (MindSpore 2.10).
Layers pass on the sum of what they add to the loss. Instead of this sum they pass on a slot for each layer, ``[rows, layers,
1 + 3 · seq · experts]``: what its router adds, its logits, its choices and their weights. A layer shifts all slots by one and
writes the last one. So the shape is the same in all layers, and equal layers are still compiled once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore import ops as P

from mindllm.config import RunConfig
from mindllm.models import CausalLM
from mindllm.models.weights import constant

ROUTER_ARRAYS = 3  # logits, choices and weights of each expert


@dataclass(frozen=True)
class HeadValues:
    """Inputs ``[parts, depths, tokens, hidden]`` and logits ``[parts, depths, tokens, vocab]`` of all uses of the head.

    Depth 0 is the next token. The others belong to layers that predict further tokens.
    """

    hidden: np.ndarray
    logits: np.ndarray


@dataclass(frozen=True)
class RouterValues:
    """Results of the routers of a step, in the order of their layers, all in fp32.

    Attributes:
        added: to the mean loss of a row, ``[parts, layers, rows]``.
        logits: ``[parts, layers, rows, seq, experts]``.
        choices: 1 for each expert that a token chooses, in the shape of the logits.
        weights: of the chosen experts, in the shape of the logits.
    """

    added: np.ndarray
    logits: np.ndarray
    choices: np.ndarray
    weights: np.ndarray


@dataclass(frozen=True)
class StepValues:
    """Values of one step.

    Attributes:
        policy: of the model's head.
        reference: of the reference model's head in preference tuning.
        added: by layers to the mean loss of each row, ``[rows]``.
        routers: results of routers that add to the loss.
    """

    policy: HeadValues
    reference: HeadValues | None = None
    added: np.ndarray | None = None
    routers: RouterValues | None = None


class ValueRecorder:
    """Records values of every step of a model that is not compiled yet, built for one device and with its loss in one piece."""

    def __init__(self, config: RunConfig, network: nn.Cell) -> None:
        self.parts = config.runner_config.gradient_accumulation_steps
        self.rows, self.model = config.runner_config.batch_size, config.model.config
        models = [cell for _, cell in network.cells_and_names() if isinstance(cell, CausalLM)]
        self.heads = [self._record_head(number, lm) for number, lm in enumerate(models)]
        self.added: Record | None = None
        self.routers: RouterRecorder | None = None
        if models[0].adds_balance:
            self.added = Record("kept.added", self.parts, (self.rows,))
            product: nn.Cell = RecordingProduct(self.added)
            layers = [layer for layer in models[0].model.layers if layer.adds_to_loss and layer.feed_forward.balances]
            if len(models) == 1 and layers:
                self.routers = RouterRecorder(layers, self.rows, self.model.seq_length)
                self.slots = Record("kept.routers", self.parts, self.routers.shape)
                product = SumOfSlots(self.slots, product)
            models[0].balance_mul = product

    def _record_head(self, number: int, lm: CausalLM) -> tuple[Record, Record]:
        tokens = self.rows * self.model.seq_length
        self.depths = 1 + (len(lm.ahead) if lm.has_mtp else 0)
        times = self.parts * self.depths
        hidden = Record(f"kept.hidden.{number}", times, (tokens, self.model.hidden_size))
        logits = Record(f"kept.logits.{number}", times, (tokens, self.model.vocab_size))
        lm.losses.head = RecordingHead(lm.lm_head, hidden, logits)
        return hidden, logits

    def values(self) -> StepValues:
        """Return the values of the last step."""
        heads = []
        for pair in self.heads:
            arrays = (record.values.asnumpy() for record in pair)
            heads.append(HeadValues(*(a.reshape(self.parts, self.depths, *a.shape[1:]).copy() for a in arrays)))
        added = None if self.added is None else self.added.values.asnumpy().reshape(-1)
        routers = None if self.routers is None else self.routers.values(self.slots.values.asnumpy())
        return StepValues(heads[0], heads[1] if len(heads) > 1 else None, added, routers)


class Record(nn.Cell):
    """Pass on a tensor of this shape, and keep those of the last ``times`` calls in fp32, the latest last."""

    def __init__(self, name: str, times: int, shape: tuple[int, ...]) -> None:
        super().__init__(auto_prefix=False)
        self.values = constant(name, np.zeros((times, *shape), np.float32))
        self.row = (1, *shape)
        self.start, self.rest = (1, *[0] * len(shape)), (times - 1, *shape)
        self.several = times > 1
        self.slice, self.concat = P.Slice(), P.Concat()
        self.reshape, self.cast = P.Reshape(), P.Cast()

    def construct(self, x: Tensor) -> Tensor:
        rows = self.reshape(self.cast(P.stop_gradient(x), ms.float32), self.row)
        if self.several:
            rows = self.concat((self.slice(self.values, self.start, self.rest), rows))
        return ops.depend(x, ops.assign(self.values, rows))


class RecordingHead(nn.Cell):
    """A head that records its inputs and its logits."""

    def __init__(self, head: nn.Cell, hidden: Record, logits: Record) -> None:
        super().__init__(auto_prefix=False)
        self.head, self.hidden, self.logits = head, hidden, logits

    def construct(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return self.logits(self.head(self.hidden(hidden), weight))


class RecordingProduct(nn.Cell):
    """A product that records its first factor."""

    def __init__(self, record: Record) -> None:
        super().__init__(auto_prefix=False)
        self.record = record
        self.mul = P.Mul()

    def construct(self, first: Tensor, second: Tensor) -> Tensor:
        return self.mul(self.record(first), second)


class SumOfSlots(nn.Cell):
    """Record the slots of all layers, and pass on the sum of what they add to the loss, ``[rows]``, to a product."""

    def __init__(self, record: nn.Cell, product: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.record, self.product = record, product
        self.sum = P.ReduceSum()

    def construct(self, added: Tensor, tokens: Tensor) -> Tensor:
        return self.product(self.sum(self.record(added)[:, :, 0], 1), tokens)


class RouterRecorder:
    """Makes ``layers`` pass on slots with the results of their routers for ``rows`` sequences of ``length`` tokens."""

    def __init__(self, layers: Sequence[nn.Cell], rows: int, length: int) -> None:
        self.rows, self.length, self.experts = rows, length, layers[0].feed_forward.router.experts
        self.shape = (rows, len(layers), 1 + ROUTER_ARRAYS * length * self.experts)
        for layer in layers:
            router = layer.feed_forward.router
            _replace_child(router, "balance", RecordingBalance(router.balance, rows))
            _replace_child(layer.feed_forward, "router", RecordingRouter(router, rows))
            layer.feed_forward.add_load = WriteSlot(*self.shape)
            layer.add_to_loss = ShiftSlots(*self.shape)

    def values(self, slots: np.ndarray) -> RouterValues:
        """Return the results of routers from recorded slots, ``[parts, *shape]``."""
        by_layer = slots.swapaxes(1, 2)
        arrays = by_layer[..., 1:].reshape(*by_layer.shape[:3], ROUTER_ARRAYS, self.length, self.experts)
        return RouterValues(by_layer[..., 0].copy(), *(arrays[:, :, :, one].copy() for one in range(ROUTER_ARRAYS)))


def _replace_child(cell: nn.Cell, name: str, child: nn.Cell) -> None:
    """Replace a child of a cell. An assignment would change the names of its parameters."""
    delattr(cell, name)
    cell.insert_child_to_cell(name, child)


class RecordingBalance(nn.Cell):
    """What a router adds to the loss, with its logits and choices: ``[rows, 1, 1 + 2 · seq · experts]``."""

    def __init__(self, balance: nn.Cell, rows: int) -> None:
        super().__init__(auto_prefix=False)
        self.balance = balance
        self.ones = Tensor(np.ones(rows, np.float32))
        self.rows = rows
        self.mul, self.reshape, self.join = P.Mul(), P.Reshape(), P.Concat(axis=2)

    def construct(self, logits: Tensor, scores: Tensor, mask: Tensor) -> Tensor:
        added = self.mul(self.balance(logits, scores, mask), self.ones)  # a scalar applies to all rows
        arrays = (added, P.stop_gradient(logits), P.stop_gradient(mask))
        return self.join([self.reshape(array, (self.rows, 1, -1)) for array in arrays])


class RecordingRouter(nn.Cell):
    """A router with a :class:`RecordingBalance` that appends the weights of the chosen experts to its result."""

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
        by_expert = self.sum(self.mul(places, self.reshape(weights, (*weights.shape, 1))), 2)
        appended = self.reshape(P.stop_gradient(by_expert), (self.rows, 1, -1))
        return chosen, weights, mask, self.join((added, appended))


class WriteSlot(nn.Cell):
    """Add the counter's zeros ``[rows]`` to what a router adds, and append that to empty slots of other layers."""

    def __init__(self, rows: int, layers: int, size: int) -> None:
        super().__init__(auto_prefix=False)
        self.empty = Tensor(np.zeros((rows, layers - 1, size), np.float32)) if layers > 1 else None
        self.first = Tensor(np.eye(1, size, dtype=np.float32).reshape(1, 1, size))
        self.rows = rows
        self.add, self.mul, self.reshape, self.join = P.Add(), P.Mul(), P.Reshape(), P.Concat(axis=1)

    def construct(self, slot: Tensor, counted: Tensor) -> Tensor:
        slot = self.add(slot, self.mul(self.reshape(counted, (self.rows, 1, 1)), self.first))
        return slot if self.empty is None else self.join((self.empty, slot))


class ShiftSlots(nn.Cell):
    """Shift the slots of earlier layers by one, and append the last slot of a layer."""

    def __init__(self, rows: int, layers: int, size: int) -> None:
        super().__init__(auto_prefix=False)
        self.others, self.one = (rows, layers - 1, size), (rows, 1, size)
        self.second, self.last = (0, 1, 0), (0, layers - 1, 0)
        self.slice, self.join = P.Slice(), P.Concat(axis=1)

    def construct(self, slots: Tensor, layer_slots: Tensor) -> Tensor:
        return self.join((self.slice(slots, self.second, self.others), self.slice(layer_slots, self.last, self.one)))
