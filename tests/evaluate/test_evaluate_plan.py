"""The order of texts: neighbours begin alike, long ones first."""

from hypothesis import given
from hypothesis import strategies as st

from mindllm.evaluate.requests import batches, ordered


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8).map(tuple), max_size=20), st.integers(1, 5))
def test_every_text_is_there_once(texts, size):
    found = [text for batch in batches(ordered(texts), size) for text in batch]
    assert sorted(found) == sorted(set(texts))


def test_questions_after_the_same_examples_are_neighbours():
    first, second = tuple(range(20)), tuple(range(50, 70))
    texts = [(*head, number) for number in (1, 2, 3) for head in (first, second)]
    found = ordered(texts)
    assert {text[:20] for text in found[:3]} in ({first}, {second})
    assert {text[:20] for text in found[3:]} in ({first}, {second})


def test_texts_that_share_nothing_are_sorted_by_length():
    texts = [(number, *range(number)) for number in (3, 9, 1, 7)]
    assert [len(text) for text in ordered(texts)] == [10, 8, 4, 2]
