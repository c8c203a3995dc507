"""What is drawn from is what transformers' logits processors leave, for any logits."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tiny import options

from mindllm.generate.choosing.sampling import candidates, log_softmax, penalise

torch = pytest.importorskip("torch")
process = pytest.importorskip("transformers.generation.logits_process")

WIDE = st.lists(st.floats(-30, 30, width=32), min_size=2, max_size=60).map(lambda values: np.array(values, np.float32))
SHORT = st.lists(st.integers(0, 11), max_size=20)
TWELVE = st.lists(st.floats(-30, 30, width=32), min_size=12, max_size=12).map(
    lambda values: np.array(values, np.float32)
)


def theirs(logits, *processors, history=(0,)):
    """Probabilities after ``processors``, float32 ``[vocab]``."""
    scores, ids = torch.from_numpy(logits.copy())[None], torch.tensor([list(history)])
    for processor in processors:
        scores = processor(ids, scores)
    return torch.softmax(scores[0].double(), -1).numpy()


def ours(logits, **limits):
    probabilities = np.zeros(len(logits))
    tokens, kept = candidates(logits, **limits)
    probabilities[tokens] = kept
    return probabilities


def same(mine, other):
    np.testing.assert_array_equal(mine > 0, other > 0)
    np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-12)


@given(WIDE, st.floats(0.25, 8))
def test_temperature(logits, temperature):
    same(ours(logits, temperature=temperature), theirs(logits, process.TemperatureLogitsWarper(temperature)))


@given(WIDE, st.integers(1, 70))
def test_top_k_with_equal_logits_too(logits, k):
    same(ours(logits, top_k=k), theirs(logits, process.TopKLogitsWarper(k)))


def no_close_call(logits, mass):
    """A limit of float32 sums is not compared at the rounding of such a sum, nor among equal logits, which have no order."""
    ascending = np.sort(np.exp(log_softmax(logits)))
    assume(len(set(logits)) == len(logits))
    assume(np.abs(np.cumsum(ascending) - mass).min() > 1e-5)


@given(WIDE, st.floats(0.01, 0.99))
def test_top_p(logits, p):
    no_close_call(logits, 1 - p)
    same(ours(logits, top_p=p), theirs(logits, process.TopPLogitsWarper(p)))


@given(WIDE, st.floats(0.001, 1))
def test_min_p_with_equal_logits_too(logits, p):
    probabilities = np.exp(log_softmax(logits))
    ratios = probabilities / probabilities.max()
    assume((np.abs(ratios - p)[ratios < 1] > 1e-5).all())
    same(ours(logits, min_p=p), theirs(logits, process.MinPLogitsWarper(p)))


@given(WIDE, st.floats(0.25, 8), st.integers(1, 30), st.floats(0.05, 0.99), st.floats(0.001, 0.5))
def test_all_limits_in_their_order(logits, temperature, k, p, share):
    scaled = np.sort(logits / np.float32(temperature))
    assume(len(set(scaled)) == len(scaled))
    kept = scaled[-min(k, len(scaled)) :]
    no_close_call(kept, 1 - p)
    ratios = np.exp(kept.astype(float) - kept.max())
    assume((np.abs(ratios - share)[ratios < 1] > 1e-5).all())
    expected = theirs(
        logits,
        process.TemperatureLogitsWarper(temperature),
        process.TopKLogitsWarper(k),
        process.TopPLogitsWarper(p),
        process.MinPLogitsWarper(share),
    )
    same(ours(logits, temperature=temperature, top_k=k, top_p=p, min_p=share), expected)


@given(TWELVE, SHORT.filter(len), SHORT, st.floats(0.5, 4))
def test_repetition_penalty(logits, prompt, written, penalty):
    kept = logits.copy()
    processor = process.RepetitionPenaltyLogitsProcessor(penalty)
    expected = processor(torch.tensor([prompt + written]), torch.from_numpy(logits.copy())[None])[0].numpy()
    lowered = penalise(logits, prompt, written, options(1, repetition_penalty=penalty))
    np.testing.assert_allclose(lowered, expected, rtol=1e-6)
    np.testing.assert_array_equal(logits, kept, err_msg="the logits belong to the caller")


@given(TWELVE, SHORT, SHORT, st.floats(-2, 2), st.floats(-2, 2))
def test_presence_and_frequency_penalty_count_what_was_written(logits, prompt, written, presence, frequency):
    kept = logits.copy()
    lowered = penalise(logits, prompt, written, options(1, presence_penalty=presence, frequency_penalty=frequency))
    for token in range(12):
        count = written.count(token)
        expected = logits[token] - (count > 0) * presence - count * frequency
        assert lowered[token] == pytest.approx(expected, rel=1e-5, abs=1e-5)
    np.testing.assert_array_equal(logits, kept)
