"""Held-out loss of batches: the mean over what counts, and that something must."""

from types import SimpleNamespace

import pytest

from mindllm.errors import UserError
from mindllm.train.evaluation import Evaluator


class Batches:
    """Two batches, of no content."""

    def __len__(self):
        return 2

    def batch(self, index):
        return index


def engine(counts):
    return SimpleNamespace(evaluate=lambda index: (3.0 * counts[index], counts[index]), simulated=False)


def test_the_mean_is_over_tokens():
    found = Evaluator(Batches(), None, None).run(engine([2.0, 0.0]))
    assert (found.loss, found.tokens) == (3.0, 2)


def test_rows_of_which_nothing_counts_are_told():
    with pytest.raises(UserError, match="all answers of the held-out rows are beyond"):
        Evaluator(Batches(), None, None).run(engine([0.0, 0.0]))
