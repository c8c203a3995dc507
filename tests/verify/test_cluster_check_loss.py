"""Mistakes that a single device and all ranks have alike: loss and gradients once more in float64, from the logits."""

from __future__ import annotations

from pathlib import Path

import pytest
from mindspore import ops
from small_cluster import cluster_run

from mindllm import verify
from mindllm.config import load_config
from mindllm.finetune import preference, unpaired
from mindllm.models import causal_lm, loss, mtp
from mindllm.reduced_runs.model import reduce_model
from mindllm.train import step
from mindllm.train.engine import replica
from mindllm.verify.side import shared_loss_problems, shared_update_problems, train_single

CLIPS = {"runner_wrapper": {"use_clip_grad": True, "max_grad_norm": 1.0}}
FORMS = Path(verify.__file__).parent / "forms"
LOSS, GRADIENT = "the loss is ", "gradient of lm_head.weight: about "


def problems_of(model=None, **sections):
    """What a single device has wrong by itself, in every step."""
    config = reduce_model(cluster_run(tp=2, model={"num_layers": 1, **(model or {})}, **{**CLIPS, **sections}))
    reference = train_single(config, 2)
    for number, task in enumerate(reference.tasks):
        yield from shared_loss_problems(reference, number)
        if not task.overflows:
            yield from shared_update_problems(config, reference, number)


def without_mask(self, losses, loss_mask):
    return self.sum(losses)


def with_shifted_mask(self, losses, loss_mask):
    return self.sum(self.mul(losses, self.reshape(ops.concat((loss_mask[:, 1:], loss_mask[:, :1]), 1), (-1,))))


def with_another_term(self, losses, loss_mask):
    return self.sum(self.mul(losses, self.reshape(loss_mask, (-1,)))) + 1e-3 * self.sum(self.mul(losses, losses))


def with_shifted_labels(self, hidden, weight, labels):
    return self.cross_entropy(self.head(hidden, weight), ops.concat((labels[1:], labels[:1])))[0]


def with_next_labels(self, labels):
    return labels


def with_twice_the_share(self, losses, mask):
    return 2.0 * self.factor * self.sum(self.mul(losses, mask)) + self.probe_sum(self.probe) * 0.0


def with_a_distance_below_nothing(self, gained, present):
    total, rows = self.sum_rows(self.weigh_other(gained, present)), self.sum_rows(present)
    return ops.stop_gradient(self.mean(total, self.at_least_one(rows, 1.0)))


def with_sums(self, total, mask):
    return total


def with_a_sum_over_rows(self, loss, added, loss_mask):
    ones = self.reshape(self.tokens_of_rows(loss_mask, 1), (-1,)) * 0.0 + 1.0
    return loss + self.balance_sum(self.balance_mul(added, ones))


class MeanOfPositions(step.TrainStep):
    """Divides by all positions of the batch, masked or not."""

    def construct(self, input_ids, labels, loss_mask, rate, scale, segment_starts=None, position_ids=None, random=None):
        summed, tokens, gradients = self.forward_backward(input_ids, labels, loss_mask, scale)
        positions = float(input_ids.shape[0] * input_ids.shape[1])
        updated = self.update(gradients, 1.0 / scale, rate, summed / positions)
        return (summed / positions, updated[0], updated[1], tokens)


class GradientsOfPositions(step.TrainStep):
    """The loss is right, gradients are a mean over all positions: their norm too, on both sides."""

    def construct(self, input_ids, labels, loss_mask, rate, scale, segment_starts=None, position_ids=None, random=None):
        summed, tokens, gradients = self.forward_backward(input_ids, labels, loss_mask, scale)
        updated = self.update(gradients, 1.0 / scale, rate, summed / tokens)
        return (summed / tokens, updated[0], updated[1], tokens)


IN_THE_MODEL = {
    "no mask": (causal_lm.CausalLM, "masked", without_mask),
    "the mask of the token before": (causal_lm.CausalLM, "masked", with_shifted_mask),
    "a term that nobody asked for": (causal_lm.CausalLM, "masked", with_another_term),
    "labels of the next token": (loss.TokenLosses, "construct", with_shifted_labels),
}


def test_a_model_without_a_mistake():
    assert list(problems_of()) == []


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if "mask" in name else []) for name in IN_THE_MODEL]
)
def test_another_loss_of_the_same_logits(name, monkeypatch):
    cell, method, mistaken = IN_THE_MODEL[name]
    monkeypatch.setattr(cell, method, mistaken)
    found = list(problems_of())
    assert sum(problem.startswith(LOSS) for problem in found) == 5  # every step, those that are skipped too
    assert any(problem.startswith(GRADIENT) for problem in found)
    assert all(problem.endswith("(on a single device too)") for problem in found)


@pytest.mark.parametrize("mistaken", [MeanOfPositions, GradientsOfPositions])
def test_a_mean_over_another_number_of_tokens(mistaken, monkeypatch):
    monkeypatch.setattr(replica, "TrainStep", mistaken)
    found = list(problems_of())
    assert [problem.startswith(GRADIENT) for problem in found].count(True) >= 1
    assert any(problem.startswith(LOSS) for problem in found) == (mistaken is MeanOfPositions)


class TwiceTheGradients(step.TrainStep):
    """The loss is right, all gradients and their norm are twice as large."""

    def construct(self, input_ids, labels, loss_mask, rate, scale, segment_starts=None, position_ids=None, random=None):
        further = (segment_starts, position_ids, random)
        summed, tokens, gradients = self.forward_backward(input_ids, labels, loss_mask, scale, *further)
        nominal = float(input_ids.shape[0] * input_ids.shape[1])
        updated = self.update(gradients, 2.0 * nominal / (scale * tokens), rate, summed / tokens)
        return (summed / tokens, updated[0], updated[1], tokens)


@pytest.mark.parametrize(
    "form",
    [
        "adapters",
        *(
            pytest.param(form, marks=pytest.mark.slow)
            for form in ("bottlenecks", "adapters_with_lengths", "preferences", "grouped_experts", "sampled_layers")
        ),
    ],
)
@pytest.mark.parametrize("mistaken", [False, True])
def test_gradients_that_are_all_twice_as_large(form, mistaken, monkeypatch):
    """No rule of a tuner says how large they are, and clipping hides it: the loss beside the weights does not."""
    if mistaken:
        monkeypatch.setattr(replica, "TrainStep", TwiceTheGradients)
    reference = train_single(reduce_model(load_config(FORMS / f"{form}.yaml")), 2)
    found = [problem for number in range(len(reference.tasks)) for problem in shared_loss_problems(reference, number)]
    assert len(found) == mistaken
    for problem in found:
        assert 1.9 < float(problem.removeprefix("gradients: about ").split()[0]) < 2.1


class OneKindDoubled(step.ForwardBackward):
    """Gradients of one kind of weight are twice as large, those that a loss gives in all other ways are right."""

    kind = ""

    def __init__(self, model, weights, positions=None):
        super().__init__(model, weights, positions)
        self.factors = tuple(2.0 if weight.name.endswith(self.kind) else 1.0 for weight in weights)

    def construct(self, input_ids, labels, loss_mask, scale, segment_starts=None, position_ids=None, random=None):
        further = (segment_starts, position_ids, random)
        loss, tokens, gradients = super().construct(input_ids, labels, loss_mask, scale, *further)
        found = ()
        for index, factor in enumerate(self.factors):
            found = (*found, gradients[index] * factor)
        return loss, tokens, found


@pytest.mark.parametrize(
    ("form", "kind"),
    [
        ("accumulation", "attention.wk.weight"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("adapters", "wv.lora_a"),
                ("grouped_experts", "router.weight"),
                ("experts", "experts.w2.weight"),
                ("unpaired_answers", "wo.lora_b"),
            )
        ),
    ],
)
def test_gradients_of_one_kind_of_weight_that_are_twice_as_large(form, kind, monkeypatch):
    monkeypatch.setattr(OneKindDoubled, "kind", kind)
    monkeypatch.setattr(step, "ForwardBackward", OneKindDoubled)
    monkeypatch.setattr(replica, "ForwardBackward", OneKindDoubled)
    reference = train_single(reduce_model(load_config(FORMS / f"{form}.yaml")), 2)
    found = [problem for number in range(len(reference.tasks)) for problem in shared_loss_problems(reference, number)]
    assert any(kind in problem and problem.startswith("gradients of ") for problem in found)
    assert all(problem.startswith("gradients") for problem in found)


def with_a_distance_that_learns(self, gained, present):
    total, rows = self.sum_rows(self.weigh_other(gained, present)), self.sum_rows(present)
    return self.not_negative(self.mean(total, self.at_least_one(rows, 1.0)), 0.0)


def test_a_distance_from_the_reference_that_has_a_gradient(monkeypatch):
    monkeypatch.setattr(unpaired.UnpairedLosses, "divergence", with_a_distance_that_learns)
    reference = train_single(reduce_model(load_config(FORMS / "unpaired_answers.yaml")), 2)
    found = [problem for number in range(len(reference.tasks)) for problem in shared_loss_problems(reference, number)]
    assert found
    assert all(problem.startswith("gradients") for problem in found)


def with_a_norm_that_is_always_reached(self, gradients, unscale, rate, loss=None, norm_limit=None, loss_limit=None):
    norm = self.global_norm(gradients) * unscale
    coefficient = unscale * (self.max_grad_norm / (norm + step.CLIP_EPSILON))
    applied = ops.isfinite(norm)
    if applied:
        norm = ops.depend(norm, self.optimizer(gradients, coefficient, rate))
    return norm, applied


def test_gradients_that_are_scaled_up_to_the_norm(monkeypatch):
    """As if every norm were too large: it is in a step that clips, and is not in the last one."""
    monkeypatch.setattr(step.ApplyGradients, "construct", with_a_norm_that_is_always_reached)
    found = list(problems_of())
    assert len([problem for problem in found if problem.startswith("gradients were applied with the norm ")]) == 1
    assert not any(problem.startswith(LOSS) for problem in found)


OF_OTHER_LOSSES = {
    "labels that stand one further": ("prediction_layers", mtp.TokenShift, "labels", with_next_labels),
    "twice the share of a prediction": ("prediction_layers", mtp.PredictionLoss, "construct", with_twice_the_share),
    "what layers add, once a row": ("experts", causal_lm.CausalLM, "balanced", with_a_sum_over_rows),
    "a distance that is not bounded": (
        "unpaired_answers",
        unpaired.UnpairedLosses,
        "divergence",
        with_a_distance_below_nothing,
    ),
    "sums in place of means": ("preferences_without_reference", preference.PairLosses, "per_token", with_sums),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_OTHER_LOSSES)
def test_another_loss_of_other_kinds(name, monkeypatch):
    form, cell, method, mistaken = OF_OTHER_LOSSES[name]
    config = reduce_model(load_config(FORMS / f"{form}.yaml"))
    monkeypatch.setattr(cell, method, mistaken)
    reference = train_single(config, 2)
    found = [problem for number in range(len(reference.tasks)) for problem in shared_loss_problems(reference, number)]
    assert found
    assert all(problem.startswith((LOSS, "gradients")) for problem in found)
