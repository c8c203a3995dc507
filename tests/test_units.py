"""Memory of devices is read in GB of 2**30 bytes: two decimals, three where no figure of a table or message reaches 1 GB."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindllm.units import GIB, MIB, device_memory, gigabytes, missing_memory, parameters_in_words, short_count


def test_figures_of_a_table_have_the_same_decimals():
    large = gigabytes([42360 * MIB, 96 * MIB])
    assert [large(size) for size in (42360 * MIB, 96 * MIB, 0, 2000 * GIB)] == ["41.37", "0.09", "0.00", "2,000.00"]
    assert [large(size) for size in (5 * MIB, 6 * MIB)] == ["<0.01", "0.01"]
    small = gigabytes([423 * MIB, 96 * MIB])
    assert [small(size) for size in (423 * MIB, 96 * MIB)] == ["0.413", "0.094"]
    assert gigabytes([])(0) == "0.000"


def test_planners_have_their_sizes_in_mb():
    in_mb = gigabytes([42360.0, 96.0], MIB)
    assert [in_mb(size) for size in (42360.0, 96.0)] == ["41.37", "0.09"]
    assert device_memory(512.0, MIB) == device_memory(512 * MIB) == "0.500 GB"


@pytest.mark.parametrize(
    ("size", "said"), [(1, "0.001 GB"), (512 * MIB, "0.500 GB"), (GIB, "1.00 GB"), (GIB + 1, "1.01 GB")]
)
def test_what_is_missing_is_never_told_as_less(size, said):
    assert missing_memory(size) == said


def test_a_small_shortage_beside_a_large_peak_is_not_zero():
    assert gigabytes([58 * GIB]).at_least(MIB) == "0.01"


def test_differences_have_a_sign_but_zero_has_no_minus():
    assert [gigabytes([3 * GIB]).signed(size) for size in (3 * MIB, -GIB)] == ["+0.00", "-1.00"]
    assert [gigabytes([3 * GIB])(size) for size in (-MIB, -GIB)] == ["0.00", "-1.00"]


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (6_738_415_616, "6.74 billion parameters"),
        (134_515_008, "0.13 billion parameters"),
        (9_185_536, "9.19 million parameters"),
        (27_040, "0.03 million parameters"),
    ],
)
def test_small_models_are_no_zero_billions(number, said):
    assert parameters_in_words(number) == said


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"), (7, "7"), (999, "999"), (1000, "1K"), (9_994, "9.99K"), (9_996, "10K"), (494_032_768, "494M"),
        (999_400_000, "999M"), (999_500_000, "1B"), (999_999_999, "1B"), (6_738_415_616, "6.74B"), (70_000_000_000, "70B"),
        (10**15, "1000T"), (123_456 * 10**12, "123456T"),
    ],
)  # fmt: skip
def test_a_count_has_three_digits_and_a_letter(count, text):
    assert short_count(count) == text


def read_count(text):
    number, letter = re.fullmatch(r"(\d+(?:\.\d{1,2})?)([KMBT]?)", text).groups()
    return float(number) * 1000 ** " KMBT".index(letter or " ")


@given(st.integers(0, 10**17), st.integers(0, 10**12))
def test_short_counts_are_monotone_and_close(count, more):
    """No exponent either: the form above has none."""
    assert read_count(short_count(count)) <= read_count(short_count(count + more))
    assert read_count(short_count(count)) == pytest.approx(count, rel=0.005)
