"""The page that holds shipped strategies beside the best that are found."""

import json

import pytest

from mindllm.errors import UserError
from mindllm.units import GIB
from toolkit.benchmark import tune_shipped

HAND = {"strategy": "dp1 tp8 pp1, 4 of 1", "speed": 1000.0, "memory": 50.0 * GIB}
BEST = {"strategy": "dp2 tp4 pp1, 2 of 1", "speed": 1100.0, "memory": 52.0 * GIB}


def row(name, hand=HAND, found=BEST, reason=""):
    return {"config": name, "devices": 8, "limit": 58.0 * GIB, "hand": hand, "found": found, "reason": reason}


def test_a_line_says_what_is_gained_or_that_the_yaml_is_best():
    over = {**HAND, "memory": 60.0 * GIB}
    rows = [row("a"), row("b", found={**BEST, "speed": 900.0}), row("c", over), row("d", None, None, "its time is")]
    (_, columns, lines), (title, _, missing) = tune_shipped.tables(rows)
    assert all(len(line) == len(columns) for line in lines)
    assert lines[0][-4:] == ("dp2 tp4 pp1, 2 of 1", "52", "1,100", "+10.0%")
    assert lines[1][-4:] == ("the YAML's", "", "", "is best")
    assert lines[2][3] == "60 (over 58)"
    assert (title, missing) == ("Not compared", [("d", "its time is")])


def test_shipped_yamls_of_several_devices_are_compared(tmp_path, monkeypatch):
    """Those of one device have no strategy, and what others are made from is no run."""
    for folder, name, based_on in (
        ("llama2", "several", "llama2/pretrain_llama2_7b_8p"),
        ("llama2", "one", "llama2/pretrain_llama2_tiny"),
        ("base", "pretrain", "base/pretrain"),
    ):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / f"{name}.yaml").write_text(f"base: {tune_shipped.SHIPPED / based_on}.yaml\n")
    monkeypatch.setattr(tune_shipped, "SHIPPED", tmp_path)
    assert tune_shipped.shipped() == ["llama2/several"]


def test_rows_of_former_sittings_stay_on_the_page(tmp_path, monkeypatch):
    kept, page = tmp_path / "rows.json", tmp_path / "page.md"
    kept.write_text(json.dumps([row("llama2/a"), row("llama2/b", found=HAND)]))
    monkeypatch.setattr(tune_shipped, "beside", lambda name, *_: row(name))
    monkeypatch.setattr(tune_shipped, "shipped", lambda: ["llama2/a", "llama2/b", "llama2/c"])
    assert tune_shipped.main(["--configs", "llama2/b", "--rows", str(kept), "--markdown", str(page)]) == 0
    assert [one["found"] for one in json.loads(kept.read_text())] == [BEST, BEST]
    text = page.read_text()
    assert text.count("+10.0%") == 2
    assert "--configs llama2/a llama2/b --markdown" in text


def test_a_small_yaml_is_compared_with_what_is_found(tmp_path, monkeypatch):
    (tmp_path / "tiny.yaml").write_text(
        f"base: {tune_shipped.SHIPPED / 'llama2/pretrain_llama2_7b_8p.yaml'}\n"
        "model:\n  model_config:\n    num_layers: 2\n"
        "parallel_config:\n  data_parallel: 2\n  pipeline_stage: 1\n  micro_batch_num: 1\n"
    )
    monkeypatch.setattr(tune_shipped, "SHIPPED", tmp_path)
    found = tune_shipped.beside("tiny", tune_shipped.read_device(tune_shipped.DEFAULT), 1, 1.0)
    assert found["found"]["speed"] > 0.95 * found["hand"]["speed"]
    with pytest.raises(UserError, match=r"none\.yaml is not there"):
        tune_shipped.beside("none", None, 1, 1.0)
