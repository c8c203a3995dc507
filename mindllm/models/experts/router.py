"""The router of a mixture of experts: which experts see a token, with which weight, and what keeps them balanced. All in fp32."""

from __future__ import annotations

import mindspore as ms
from mindspore import Parameter, Tensor, nn
from mindspore import ops as P
from mindspore.common.initializer import Constant, initializer

from mindllm.architecture.experts import RouterSpec
from mindllm.models.weights import normal_parameter

NEVER = -1e9  # below any score
TINY = 1e-20  # keeps a sum of sigmoids from being zero


class Router(nn.Cell):
    """``[batch · seq, hidden]`` -> the chosen experts int32 and their weights fp32, both ``[batch, seq, chosen]``, a mask of
    them fp32 ``[batch, seq, experts]``, and the loss that each sequence adds to the mean loss of its tokens, fp32 ``[batch]``
    (``[1]`` if it is one number for all of them).

    ``bias`` is a weight without gradient: it is in checkpoints, and the counter of tokens per expert changes it
    between steps (Wang et al., 2024).
    """

    def __init__(self, spec: RouterSpec, hidden_size: int, std: float) -> None:
        super().__init__()
        self.experts = spec.experts
        self.top_k = spec.top_k
        self.weight = normal_parameter("weight", (spec.experts, hidden_size), std)
        self.has_bias = spec.bias
        if spec.bias:
            self.bias = Parameter(initializer("zeros", (spec.experts,), ms.float32), name="bias")
            self.bias_add = P.Add()
        self.matmul = P.MatMul(transpose_b=True)
        self.scores = Scores(spec)
        self.limited = spec.groups > 1
        if self.limited:
            self.groups = BestGroups(spec)
        self.topk = P.TopK(sorted=True)
        self.pick = P.GatherD()
        self.renormalises = spec.renormalise and spec.top_k > 1
        if self.renormalises:
            self.total = P.ReduceSum(keep_dims=True)
            self.add_tiny = P.Add()
            self.divide = P.RealDiv()
        self.scale = spec.scale
        if spec.scale != 1.0:
            self.multiply = P.Mul()
        self.onehot = P.OneHot()
        self.mark = P.ReduceSum()
        self.on = Tensor(1.0, ms.float32)
        self.off = Tensor(0.0, ms.float32)
        self.adds_to_loss = spec.adds_to_loss
        if spec.adds_to_loss:
            self.balance = Balance(spec)
        self.cast = P.Cast()
        self.reshape = P.Reshape()

    def construct(self, x: Tensor, batch: int) -> tuple[Tensor, Tensor, Tensor, Tensor | float]:
        logits = self.matmul(self.cast(x, ms.float32), self.weight)
        logits = self.reshape(logits, (batch, -1, self.experts))
        scores = self.scores(logits)
        chosen = self.choice(P.stop_gradient(scores))
        weights = self.pick(scores, 2, chosen)
        if self.renormalises:
            weights = self.divide(weights, self.add_tiny(self.total(weights, 2), TINY))
        if self.scale != 1.0:
            weights = self.multiply(weights, self.scale)
        mask = self.mark(self.onehot(chosen, self.experts, self.on, self.off), 2)
        added = self.balance(logits, scores, mask) if self.adds_to_loss else 0.0
        return chosen, weights, mask, added

    def choice(self, scores: Tensor) -> Tensor:
        """Return the experts of each token, best first: int32 ``[batch, seq, chosen]``."""
        if self.has_bias:
            # Its gradient is zero by itself, for places have none. Stopped, it has no shape in a network that is compiled once.
            scores = self.bias_add(scores, self.bias)
        if self.limited:
            scores = self.groups(scores)
        return self.topk(scores, self.top_k)[1]


class Scores(nn.Cell):
    """Softmax over the experts, or sigmoids: logits ``[batch, seq, experts]`` -> as they are."""

    def __init__(self, spec: RouterSpec) -> None:
        super().__init__()
        self.by_sigmoid = spec.sigmoid
        if spec.sigmoid:
            self.sigmoid = P.Sigmoid()
        else:
            self.softmax = P.Softmax(axis=-1)

    def construct(self, logits: Tensor) -> Tensor:
        return self.sigmoid(logits) if self.by_sigmoid else self.softmax(logits)


class BestGroups(nn.Cell):
    """Scores ``[batch, seq, experts]`` with those outside of a token's best groups so low that none is chosen."""

    def __init__(self, spec: RouterSpec) -> None:
        super().__init__()
        self.experts = spec.experts
        self.groups = spec.groups
        self.chosen_groups = spec.chosen_groups
        self.deciding = 2 if spec.bias else 1  # the score of a group is the sum of this number of its best experts
        self.best_experts = P.TopK(sorted=True)
        self.group_sum = P.ReduceSum()
        self.best_groups = P.TopK(sorted=True)
        self.onehot = P.OneHot()
        self.mark = P.ReduceSum()
        self.shift = P.Sub()
        self.penalty = P.Mul()
        self.add = P.Add()
        self.reshape = P.Reshape()
        self.on = Tensor(1.0, ms.float32)
        self.off = Tensor(0.0, ms.float32)

    def construct(self, scores: Tensor) -> Tensor:
        batch, length, _ = scores.shape
        grouped = self.reshape(scores, (batch, length, self.groups, -1))
        group_scores = self.group_sum(self.best_experts(grouped, self.deciding)[0], 3)
        chosen = self.best_groups(group_scores, self.chosen_groups)[1]
        inside = self.mark(self.onehot(chosen, self.groups, self.on, self.off), 2)
        outside = self.penalty(self.shift(inside, 1.0), -NEVER)
        grouped = self.add(grouped, self.reshape(outside, (batch, length, self.groups, 1)))
        return self.reshape(grouped, (batch, length, self.experts))


class Balance(nn.Cell):
    """The balance loss of experts, for each sequence fp32 ``[batch]``, relative to the mean loss of a token.

    With ``f`` the part of the choices that fell on an expert times their number, and ``p`` its mean score (scores divided by
    their sum): ``Σ f p`` over the experts, 1 if all are equal. ``expert`` takes both of a sequence, ``switch`` both of all
    sequences; those of groups are :class:`GroupBalance`. The z-loss is the mean squared log normalizer of the logits.

    ``global`` takes ``p`` of a sequence and ``f`` of the global batch of the step before: ``shares`` fp32 ``[experts]``, with
    the sum 1. They have no gradient; the counter of tokens per expert sets them between steps. They start equal: then the loss is
    1 and its gradient zero.

    ``switch`` is added last: alone it ``is_one_number`` for all sequences, fp32 ``[1]``, which no layout splits.
    """

    def __init__(self, spec: RouterSpec) -> None:
        super().__init__()
        factors = dict(spec.balance_losses)
        self.of_sequence, self.of_all = factors.get("expert", 0.0), factors.get("switch", 0.0)
        self.of_global = factors.get("global", 0.0)
        self.share = spec.experts / spec.top_k
        self.sigmoid = spec.sigmoid
        self.mean_mask = P.ReduceMean()
        self.mean_score = P.ReduceMean()
        if spec.sigmoid:
            self.score_total = P.ReduceSum(keep_dims=True)
            self.score_divide = P.RealDiv()
        if self.of_sequence:
            self.sequence_mul = P.Mul()
            self.sequence_sum = P.ReduceSum()
            self.sequence_scale = P.Mul()
        if self.of_all:
            self.batch_mask = P.ReduceMean(keep_dims=True)
            self.batch_score = P.ReduceMean(keep_dims=True)
            self.batch_mul = P.Mul()
            self.batch_sum = P.ReduceSum(keep_dims=True)
            self.batch_scale = P.Mul()
        if self.of_global:
            equal = initializer(Constant(1.0 / spec.experts), (spec.experts,), ms.float32)
            self.shares = Parameter(equal, name="shares", requires_grad=False)
            self.global_mul = P.Mul()
            self.global_sum = P.ReduceSum()
            self.global_scale = P.Mul()
            self.global_factor = self.of_global * spec.experts
        self.z_loss = spec.z_loss
        if spec.z_loss:
            self.largest = P.ReduceMax(keep_dims=True)
            self.sub = P.Sub()
            self.exp = P.Exp()
            self.exp_sum = P.ReduceSum(keep_dims=True)
            self.log = P.Log()
            self.add_largest = P.Add()
            self.square = P.Square()
            self.z_mean = P.ReduceMean()
            self.z_scale = P.Mul()
        self.of_groups = factors.get("device", 0.0) > 0 or factors.get("communication", 0.0) > 0
        if self.of_groups:
            self.group_balance = GroupBalance(spec)
        self.adds_groups = bool(self.of_groups and self.of_sequence)
        self.adds_global = bool(self.of_global and (self.of_sequence or self.of_groups))
        self.adds_z = bool(spec.z_loss and (self.of_sequence or self.of_groups or self.of_global))
        of_sequences = bool(self.of_sequence or self.of_groups or self.of_global or spec.z_loss)
        self.adds_switch = bool(self.of_all and of_sequences)
        self.is_one_number = not of_sequences
        if self.adds_groups:
            self.add_groups = P.Add()
        if self.adds_global:
            self.add_global = P.Add()
        if self.adds_z:
            self.add_z = P.Add()
        if self.adds_switch:
            self.add_switch = P.Add()
        self.reshape = P.Reshape()

    def construct(self, logits: Tensor, scores: Tensor, mask: Tensor) -> Tensor:
        """Compute the balance. All inputs are ``[batch, seq, experts]``."""
        if self.sigmoid:
            scores = self.score_divide(scores, self.score_total(scores, 2))
        added, group_mask = None, None
        if self.of_sequence or self.of_all or self.of_groups or self.of_global:
            frequency, score = self.mean_mask(P.stop_gradient(mask), 1), self.mean_score(scores, 1)
            if self.of_sequence:
                product = self.sequence_sum(self.sequence_mul(frequency, score), 1)
                added = self.sequence_scale(product, self.of_sequence * self.share)
            if self.of_groups:
                group_scores = self.group_balance(mask, frequency, score)
                added = group_scores if added is None else self.add_groups(added, group_scores)
            if self.of_global:
                product = self.global_sum(self.global_mul(score, self.shares), 1)
                global_loss = self.global_scale(product, self.global_factor)
                added = global_loss if added is None else self.add_global(added, global_loss)
            if self.of_all:
                product = self.batch_mul(self.batch_mask(frequency, 0), self.batch_score(score, 0))
                group_mask = self.batch_scale(self.batch_sum(product, (0, 1)), self.of_all * self.share)
                group_mask = self.reshape(group_mask, (1,))
        if self.z_loss:
            squared = self.z_scale(self.z_mean(self.square(self.log_normaliser(logits)), (1, 2)), self.z_loss)
            added = squared if added is None else self.add_z(added, squared)
        if group_mask is None:
            return added
        return group_mask if added is None else self.add_switch(added, group_mask)

    def log_normaliser(self, logits: Tensor) -> Tensor:
        """``log Σ exp`` over the experts: ``[batch, seq, 1]``."""
        largest = P.stop_gradient(self.largest(logits, 2))
        return self.add_largest(self.log(self.exp_sum(self.exp(self.sub(logits, largest)), 2)), largest)


class GroupBalance(nn.Cell):
    """What keeps groups of experts balanced, one for each device that a token may be sent to: fp32 ``[batch]``.

    ``device``: ``Σ f p`` over the groups, of the mean ``f`` and the sum of ``p`` of a group's experts. ``communication``: the
    same with the part of the tokens that chose any expert of the group, relative to that where all groups are alike.
    """

    def __init__(self, spec: RouterSpec) -> None:
        super().__init__()
        factors = dict(spec.balance_losses)
        self.groups = spec.groups
        self.device = factors.get("device", 0.0) * spec.experts / spec.top_k
        self.communication = factors.get("communication", 0.0) * spec.groups / spec.chosen_groups
        self.group_score = P.ReduceSum()
        if self.device:
            self.group_mask = P.ReduceMean()
            self.device_mul = P.Mul()
            self.device_sum = P.ReduceSum()
            self.device_scale = P.Mul()
        if self.communication:
            self.any_of_group = P.ReduceMax()
            self.sent = P.ReduceMean()
            self.sent_mul = P.Mul()
            self.sent_sum = P.ReduceSum()
            self.sent_scale = P.Mul()
        self.adds_both = bool(self.device and self.communication)
        if self.adds_both:
            self.add_both = P.Add()
        self.reshape = P.Reshape()

    def construct(self, mask: Tensor, frequency: Tensor, score: Tensor) -> Tensor:
        """Compute it from a mask ``[batch, seq, experts]`` and means over the sequence ``[batch, experts]``."""
        batch, length, _ = mask.shape
        scores = self.group_score(self.reshape(score, (batch, self.groups, -1)), 2)
        added = None
        if self.device:
            mean = self.group_mask(self.reshape(frequency, (batch, self.groups, -1)), 2)
            added = self.device_scale(self.device_sum(self.device_mul(mean, scores), 1), self.device)
        if self.communication:
            any_expert = self.any_of_group(P.stop_gradient(self.reshape(mask, (batch, length, self.groups, -1))), 3)
            sent = self.sent_sum(self.sent_mul(self.sent(any_expert, 1), scores), 1)
            sent = self.sent_scale(sent, self.communication)
            added = sent if added is None else self.add_both(added, sent)
        return added
