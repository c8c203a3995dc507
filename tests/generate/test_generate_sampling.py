"""Sampling as functions of the logits: the distributions are those of the definitions, and a seed repeats the draws."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindllm.generate.choosing.sampling import candidates, draw, greedy, random_streams, softmax

LOGITS = st.lists(st.floats(-30, 30, width=32), min_size=2, max_size=60).map(
    lambda values: np.array(values, np.float32)
)
UNIFORM = st.floats(0, 1, exclude_max=True)
TEMPERATURE = st.floats(0.05, 20)
TOP_P = st.floats(0.01, 1)


@given(LOGITS, UNIFORM, TEMPERATURE, TOP_P)
def test_top_k_of_one_is_greedy(logits, uniform, temperature, top_p):
    assert logits[draw(logits, uniform, temperature=temperature, top_k=1, top_p=top_p)] == logits[greedy(logits)]


@given(LOGITS, TEMPERATURE)
def test_without_limits_it_is_the_softmax(logits, temperature):
    tokens, probabilities = candidates(logits, temperature)
    np.testing.assert_array_equal(tokens, np.arange(len(logits)))
    np.testing.assert_allclose(probabilities, softmax(logits.astype(np.float64) / temperature))


@given(LOGITS, TEMPERATURE, st.integers(1, 70))
def test_top_k_keeps_the_k_most_likely(logits, temperature, k):
    tokens, probabilities = candidates(logits, temperature, top_k=k)
    assert len(tokens) >= min(k, len(logits))
    assert (logits[tokens] > logits[tokens].min()).sum() < k, (
        "more than k only where the last of them are equally likely"
    )
    assert len(set(tokens)) == len(tokens)
    assert probabilities.sum() == pytest.approx(1)
    left_out = np.delete(logits, tokens)
    assert not len(left_out) or left_out.max() < logits[tokens].min()


@given(LOGITS, TEMPERATURE, TOP_P)
def test_top_p_is_the_smallest_set_of_that_mass(logits, temperature, top_p):
    mass = softmax(logits.astype(np.float64) / temperature)
    tokens, probabilities = candidates(logits, temperature, top_p=top_p)
    kept = mass[tokens]
    assert kept.sum() >= top_p - 1e-9
    assert len(tokens) == 1 or kept.sum() - kept.min() < top_p + 1e-9
    left_out = np.delete(mass, tokens)
    assert not len(left_out) or left_out.max() <= kept.min()
    np.testing.assert_allclose(probabilities, kept / kept.sum())


@given(LOGITS, st.integers(1, 20), TOP_P)
def test_top_p_is_taken_of_what_top_k_leaves(logits, k, top_p):
    tokens, _ = candidates(logits, top_k=k, top_p=top_p)
    of_k, mass = candidates(logits, top_k=k)
    by_mass = np.argsort(-logits[of_k], kind="stable")
    before = np.cumsum(mass[by_mass]) - mass[by_mass]  # the mass of the tokens that are more likely
    assert set(of_k[by_mass][before < top_p - 1e-9]) <= set(tokens)
    assert set(tokens) <= set(of_k[by_mass][before < top_p + 1e-9])


@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"temperature": 0.5},
        {"top_k": 4},
        {"top_p": 0.7},
        {"temperature": 2.0, "top_k": 7, "top_p": 0.8},
        {"min_p": 0.1},
    ],
)
def test_many_draws_have_the_distribution(limits):
    logits = np.random.default_rng(5).normal(size=12).astype(np.float32) * 2
    tokens, probabilities = candidates(logits, **limits)
    count = 20_000
    (stream,) = random_streams([[1, 2, 3]], seed=7)
    drawn = np.bincount([draw(logits, uniform, **limits) for uniform in stream.random(count)], minlength=12)
    assert set(np.flatnonzero(drawn)) <= set(tokens)
    deviation = np.sqrt(probabilities * (1 - probabilities) * count)
    assert (np.abs(drawn[tokens] - probabilities * count) < 5 * deviation + 1).all()


@settings(max_examples=30)
@given(st.integers(0, 2**63), st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=3), min_size=1, max_size=6))
def test_a_prompt_draws_alike_alone_and_in_any_batch(seed, prompts):
    drawn = [stream.random(4).tolist() for stream in random_streams(prompts, seed)]
    for index, prompt in enumerate(prompts):
        if prompt not in prompts[:index]:
            (alone,) = random_streams([prompt], seed)
            assert alone.random(4).tolist() == drawn[index]
    assert len({tuple(numbers) for numbers in drawn}) == len(prompts), "the same prompt twice continues in two ways"


def test_the_seed_decides():
    first, again, other = (random_streams([[4, 5]], seed)[0].random() for seed in (1, 1, 2))
    assert first == again != other
