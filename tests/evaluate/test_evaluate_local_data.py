"""Data sets in directories: which one is read, and what is said where there is none."""

import pytest

pytest.importorskip("lm_eval")

import datasets
from tiny_hub import write_dataset

from mindllm.errors import UserError
from mindllm.evaluate.local_data import local_data

NAME = "owner/questions"


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def write(directory, text):
    write_dataset(directory / NAME, ("easy", {"test": [{"question": text}]}))
    return directory


def read(directory, config="easy"):
    with local_data(directory):
        return datasets.load_dataset(NAME, config)["test"]["question"][0]


def test_data_sets_of_one_name_in_two_directories_are_two(tmp_path):
    one, two = write(tmp_path / "one", "first?"), write(tmp_path / "two", "second?")
    assert [read(one), read(two), read(one)] == ["first?", "second?", "first?"]


def test_a_data_set_that_was_written_anew_is_read_anew(tmp_path):
    hub = write(tmp_path / "hub", "old?")
    assert read(hub) == "old?"
    (file,) = (hub / NAME).rglob("*.parquet")
    (write(tmp_path / "other", "a longer one?") / NAME / "easy" / file.name).replace(file)
    assert read(hub) == "a longer one?"


def test_a_data_set_may_lie_under_its_name_alone(tmp_path):
    hub = write(tmp_path / "hub", "here?")
    (hub / NAME).rename(hub / "questions")
    assert read(hub) == "here?"


def test_what_is_missing_is_named_with_the_place_for_it(tmp_path):
    place = tmp_path / NAME
    with pytest.raises(UserError, match=f"the data set {NAME} is not in {place}: .* --local-dir {place}"):
        read(tmp_path)


def test_a_part_that_is_missing_and_files_that_are_damaged_are_named(tmp_path):
    hub = write(tmp_path / "hub", "here?")
    with pytest.raises(UserError, match=r"cannot be read as the data set owner/questions \(hard\): .*hard"):
        read(hub, "hard")
    (file,) = (hub / NAME).rglob("*.parquet")
    file.write_bytes(b"nonsense")
    with pytest.raises(UserError, match=f"{hub / NAME}: cannot be read as the data set"):
        read(hub)


def test_nothing_is_replaced_when_the_evaluation_is_over(tmp_path):
    before = datasets.load_dataset
    with pytest.raises(UserError):
        read(tmp_path)
    assert datasets.load_dataset is before
