"""Answers that are kept: an evaluation goes on where it was, whatever stopped it; processes share requests."""

import threading

import pytest

from mindllm.errors import RunFailed
from mindllm.evaluate.answers import Answers
from mindllm.train.job.ranks import SINGLE_RANK, Ranks

KEYS = [((1, 2), (3,)), ((1, 2), (4,)), ((5,), (6, 7))]


def test_answers_are_there_for_who_comes_later(tmp_path):
    first = Answers(tmp_path)
    first.put("loglikelihood", KEYS[0], (-1.5, True))
    later = Answers(tmp_path)
    assert later.of("loglikelihood", KEYS) == {KEYS[0]: [-1.5, True]}
    assert later.of("generate_until", KEYS) == {}
    assert later.reused == 1


def test_a_line_that_was_cut_short_is_no_answer_and_harms_no_other(tmp_path):
    first = Answers(tmp_path)
    for place, key in enumerate(KEYS[:2]):
        first.put("loglikelihood", key, (-float(place), False))
    first.close()
    path = tmp_path / "rank_0.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    again = Answers(tmp_path)
    assert list(again.of("loglikelihood", KEYS)) == KEYS[:1]
    again.put("loglikelihood", KEYS[1], (-1.0, False))
    again.close()
    assert list(Answers(tmp_path).of("loglikelihood", KEYS)) == KEYS[:2]


class Threads:
    """A meeting of threads."""

    def __init__(self, count):
        self.barrier = threading.Barrier(count, timeout=60)

    def sum(self, values):
        self.barrier.wait()
        return list(values)


def run(count, work):
    meeting = Threads(count)
    threads = [threading.Thread(target=work, args=(Ranks(rank, count, meeting),)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_processes_share_requests_and_all_get_all_answers(tmp_path):
    done, found = {}, {}

    def work(ranks):
        answers = Answers(tmp_path, ranks)
        done[ranks.rank] = answers.share(KEYS)
        for key in done[ranks.rank]:
            answers.put("loglikelihood", key, (float(sum(key[0])), True))
        found[ranks.rank] = answers.completed("loglikelihood", KEYS, {})

    run(2, work)
    assert sorted(done[0] + done[1]) == sorted(KEYS)
    assert done[0]
    assert done[1]
    assert found[0] == found[1] == {key: [float(sum(key[0])), True] for key in KEYS}


def test_answers_of_others_that_are_missing_are_an_error(tmp_path):
    errors = []

    def work(ranks):
        answers = Answers(tmp_path / str(ranks.rank), ranks)  # not shared
        for key in answers.share(KEYS):
            answers.put("loglikelihood", key, (0.0, True))
        try:
            answers.completed("loglikelihood", KEYS, {})
        except RunFailed as error:
            errors.append(str(error))

    run(2, work)
    assert len(errors) == 2
    assert "shared by all" in errors[0]


def test_nothing_is_written_without_a_directory(tmp_path):
    answers = Answers(None, SINGLE_RANK)
    answers.put("loglikelihood", KEYS[0], (0.0, True))
    assert answers.of("loglikelihood", KEYS) == {KEYS[0]: (0.0, True)}
    with pytest.raises(ValueError, match="directory"):
        Answers(None, Ranks(0, 2, Threads(2)))
