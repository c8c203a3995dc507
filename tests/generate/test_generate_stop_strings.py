"""Stop strings end a text at the same place however the text is cut into pieces."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from mindllm.generate.choosing.growing import StopStrings

LETTERS = st.text("ab", max_size=14)
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3)


def passed(stops, pieces):
    """The pieces that come out, and whether a stop string was found."""
    strings = StopStrings(stops)
    written = []
    for piece in pieces:
        written.append(strings.push(piece))
        if strings.found:
            return written, True
    return [*written, strings.finish()], False


def expected(stops, text):
    """The text before the stop string that is complete first, of those that end together the longest."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], True
    return text, False


@given(STOPS, LETTERS, st.data())
def test_any_cut_ends_alike(stops, text, data):
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)) | {0, len(text)})
    pieces = [text[start:end] for start, end in pairwise(cuts)]
    written, found = passed(stops, pieces)
    assert ("".join(written), found) == expected(stops, text)


@given(STOPS, LETTERS)
def test_no_more_is_held_back_than_may_become_a_stop_string(stops, text):
    strings = StopStrings(stops)
    out = ""
    for index, letter in enumerate(text):
        out += strings.push(letter)
        if strings.found:
            return
        held = text[len(out) : index + 1]
        assert not held or any(stop.startswith(held) for stop in stops)


def test_without_stop_strings_everything_passes_at_once():
    assert passed((), ["a", "bc"]) == (["a", "bc", ""], False)


def test_what_comes_after_is_dropped():
    strings = StopStrings(["\n\n"])
    assert [strings.push(piece) for piece in ("one\n", "\ntwo", "three")] == ["one", "", ""]
    assert strings.found
    assert strings.finish() == ""
