"""The table of MindFormers' published speeds: what is read of cards, and which of a YAML's rows stands for what."""

import pytest

from mindllm.errors import UserError
from tests.mindformers.mindformers_files import LEGACY, writer
from toolkit.benchmark.published_yamls import ADAPTERS, COMPOSED, FUSED, Compared, compare, lines_of, main

SMALL = {"model.model_config.num_layers": 2}
PET = {"pet_type": "lora", "lora_rank": 8, "lora_alpha": 16, "lora_dropout": 0.05, "target_modules": ".*wq|.*wv"}


@pytest.fixture
def releases(tmp_path):
    place = tmp_path / "r1"
    place.mkdir()
    for name, changes in {
        "plain": {},
        "composed": {"model.model_config.use_flash_attention": False},
        "adapters": {"model.model_config.pet_config": PET},
        "unknown": {"model.arch.type": "NoSuchNetwork"},
    }.items():
        writer(tmp_path)(LEGACY, SMALL | changes).rename(place / f"{name}.yaml")
    return tmp_path


def _row(name, speed):
    return {"release": "r1", "yaml": f"{name}.yaml", "hardware": "A2", "tokens_per_s_per_device": speed, "card": "a.md"}


def test_every_row_is_timed_or_says_why_not(releases):
    names = ("plain", "composed", "adapters", "unknown", "not_there")
    found = list(compare([_row(name, "1000") for name in names], releases, {("r1", "1000")}))
    assert [one.kind for one in found] == [FUSED, COMPOSED, ADAPTERS, ""]
    assert [one.reason for one in found] == ["", "", "", "does not convert"]
    assert all(one.fitted for one in found)
    assert all(one.predicted > 1000 for one in found[:3])
    assert found[1].predicted < found[0].predicted < found[2].predicted


def test_medians_are_of_rows_that_nothing_was_fitted_to():
    def one(kind, published, fitted=False):
        return Compared("row", kind, fitted, published, 100.0)

    lines = lines_of(
        [one(FUSED, 105.0), one(FUSED, 90.0), one(FUSED, 200.0), one(ADAPTERS, 99.0), one(FUSED, 101.0, True)]
    )
    shares = {line[0]: line[1:] for line in lines[5:]}
    assert shares[f"median / {FUSED}"] == ("2 of 3 within 13%", "", "", "10.0%")
    assert shares[f"median / {ADAPTERS}"] == ("1 of 1 within 13%", "", "", "1.0%")
    assert shares["median / fitted"][3] == "1.0%"


def test_a_directory_without_releases_is_told_what_to_write(tmp_path, capsys):
    data = tmp_path / "data"
    data.mkdir()
    (data / "throughput.csv").write_text("release,ep,tokens_per_s_per_device\nr1,,1\n")
    (data / "mindformers_cards.csv").write_text(
        "release,card,yaml,hardware,tokens_per_s_per_device\nr1,a,b.yaml,A2,1\n"
    )
    with pytest.raises(UserError, match="clone MindFormers r1"):
        main(["--data", str(data), "--releases", str(tmp_path)])
