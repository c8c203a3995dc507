"""What both sides would get wrong: the update done once more, and counters of steps."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from small_cluster import cluster_run

from mindllm.architecture.optimizer_state import MOMENT_PREFIXES
from mindllm.config.optimizer import OptimizerConfig
from mindllm.verify.compare import TOLERANCES, errors_from_moments
from mindllm.verify.recomputed.update import update_problems
from mindllm.verify.side import count_errors

MATRIX, NORM = "model.layers.0.attention.wq.weight", "model.norm_out.weight"
RATE, UPDATES = 1e-2, 2
COUNTER = "load.model.layers.0.feed_forward.load.probe"


def run():
    return cluster_run(
        tp=2, optimizer={"weight_decay": 0.1}, runner_wrapper={"use_clip_grad": True, "max_grad_norm": 0.1}
    )


def update(clips: bool = True, corrects: bool = True, decays_norms: bool = False, squares: float = 1.0):
    """Weights and moments in fp32 before and after an update, and the norm of its gradients."""
    random, optimizer = np.random.default_rng(1), run().optimizer
    beta1, beta2 = optimizer.betas
    gradients = {MATRIX: random.normal(size=(6, 4)), NORM: random.normal(size=(4,))}
    norm = float(np.sqrt(sum(np.sum(gradient**2) for gradient in gradients.values())))
    before, after = {}, {}
    for name, gradient in gradients.items():
        applied = gradient * (0.1 / norm if clips else 1.0)
        weight, first, second = random.normal(size=(3, *gradient.shape)) * np.reshape(
            [1, 1e-2, 1e-3], (3, *[1] * gradient.ndim)
        )
        second = np.abs(second)
        gained = beta1 * first + (1 - beta1) * applied
        mean = beta2 * second + squares * (1 - beta2) * applied**2
        left1, left2 = (1 - beta1**UPDATES, 1 - beta2**UPDATES) if corrects else (1.0, 1.0)
        decay = 0.1 if name == MATRIX or decays_norms else 0.0
        changed = weight - RATE * (gained / left1 / (np.sqrt(mean / left2) + optimizer.eps) + decay * weight)
        for state, values in ((before, (weight, first, second)), (after, (changed, gained, mean))):
            names = (name, *(f"{prefix}{name}" for prefix in MOMENT_PREFIXES))
            state |= {one: np.float32(value) for one, value in zip(names, values, strict=True)}
    return norm, before, after


@pytest.mark.parametrize(
    ("mistake", "begins"),
    [
        ({}, []),
        ({"clips": False}, ["gradients were applied with the norm "]),
        ({"decays_norms": True}, [f"{NORM}: off by "]),
        ({"corrects": False}, [f"{MATRIX}: off by ", f"{NORM}: off by "]),
        ({"squares": 100.0}, [f"adam_v.{MATRIX}: not the mean ", f"adam_v.{NORM}: not the mean "]),
    ],
)
def test_an_update_is_that_of_the_yaml(mistake, begins):
    problems = list(update_problems(run(), UPDATES, lambda name: RATE, *update(**mistake)))
    assert len(problems) == len(begins)
    assert all(problem.startswith(begin) for problem, begin in zip(problems, begins, strict=True))


STACK = "model.layers.0.feed_forward.experts.w1.weight"


def stacked(sides=(1, 2), longest=4, momentum=0.95):
    """The same of three experts' matrices, updated by Muon in float64; mistakes: which sides a norm is of, the size of a step."""
    random, optimizer = np.random.default_rng(2), OptimizerConfig(type="Muon")
    weight, kept, gradient = random.normal(size=(3, 3, 4, 2))
    moment = momentum * kept + gradient
    x = gradient + 0.95 * moment
    x = x / (np.sqrt(np.sum(x**2, sides, keepdims=True)) + 1e-7)
    for a, b, c in optimizer.newton_schulz:
        square = x.transpose(0, 2, 1) @ x
        x = a * x + x @ (b * square + c * square @ square)
    step = optimizer.matched_adamw_rms * np.sqrt(longest) * x
    changed = weight - RATE * (step + optimizer.weight_decay * weight)
    names = (STACK, f"muon_m.{STACK}")
    before, after = (
        {name: np.float32(value) for name, value in zip(names, values, strict=True)}
        for values in ((weight, kept), (changed, moment))
    )
    return float(np.linalg.norm(gradient)), before, after


@pytest.mark.parametrize(
    ("mistake", "begins"),
    [
        ({}, []),
        ({"sides": (0, 1, 2)}, [f"{STACK}: off by "]),  # the stack is one matrix
        ({"sides": (0, 2)}, [f"{STACK}: off by "]),
        ({"longest": 12}, [f"{STACK}: off by "]),  # rows of all experts
        ({"momentum": 0.5}, ["gradients were applied with the norm ", f"{STACK}: off by "]),
    ],
    ids=["right", "one norm", "norms of rows", "size of the stack", "momentum"],
)
def test_experts_are_updated_each_for_itself(mistake, begins):
    config = cluster_run(optimizer={"type": "Muon"}, runner_wrapper={"use_clip_grad": False})
    problems = list(update_problems(config, UPDATES, lambda name: RATE, *stacked(**mistake)))
    assert len(problems) == len(begins), problems
    assert all(problem.startswith(begin) for problem, begin in zip(problems, begins, strict=True))


def test_counters_that_a_rank_has_otherwise():
    whole = np.float32([3, 1, 4, 0])

    def cluster(*values):
        held = [{COUNTER: SimpleNamespace(value=np.float32(value))} for value in values]
        return SimpleNamespace(machines=[SimpleNamespace(rank=rank, parameters=one) for rank, one in enumerate(held)])

    of = lambda *values: list(count_errors(cluster(*values), {COUNTER: whole}, 1e-4))  # noqa: E731
    assert of(whole, whole, 0 * whole) == []  # the last one is of another stage
    assert of(whole, 2 * whole) == [f"{COUNTER} on rank 1: off by 4.00e+00, 1.00e+00 of its largest"]
    assert of(0 * whole) == [f"{COUNTER}: no rank has counted anything"]


def test_errors_of_weights_that_errors_of_moments_explain():
    """An element whose second moment is small may be off by as much as its first moment may; one with a large one may not."""
    optimizer = run().optimizer
    first, second = (np.float32(values) for values in ([1e-2, 1e-6], [1e-4, 0.0]))
    state = {
        NORM: np.ones(2, np.float32),
        **dict(zip((f"{one}{NORM}" for one in MOMENT_PREFIXES), (first, second), strict=True)),
    }
    explained = errors_from_moments(optimizer, TOLERANCES["float32"], lambda name: RATE, UPDATES, state)
    large, small = explained(NORM)
    beta1, beta2 = optimizer.betas
    error = 1e-4 * 1e-2 / (1 - beta1**UPDATES)
    assert large == pytest.approx(RATE * error / (np.sqrt(1e-4 / (1 - beta2**UPDATES)) + optimizer.eps), rel=1e-5)
    assert small == pytest.approx(RATE * error / optimizer.eps, rel=1e-5)
    assert (
        errors_from_moments(optimizer, TOLERANCES["float32"], lambda name: RATE, UPDATES, {NORM: first})(NORM) is None
    )
