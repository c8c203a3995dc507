"""`mindllm profile`: tables, page, JSON, and the calibrated device."""

import json

import pytest
from profile_maker import KEYS, YAML, Maker, Plants

from mindllm.cli.profile import main
from mindllm.profiles.calibrated import calibrated
from mindllm.profiles.compare import compare
from mindllm.profiles.report import ProfileReport
from mindllm.profiles.run import read_recording
from mindllm.timing.configured import workload_of
from mindllm.timing.device import DEFAULT, read_device
from mindllm.timing.measured.calibrate import constants, with_constants
from mindllm.timing.step import step_time

TRUTH = {"matrix": 0.5, "attention": 0.42, "memory": 0.6, "HCCS": 0.4, "step_overhead": 0.25}


def test_one_command_says_where_a_step_differs(step, tmp_path, capsys):
    Maker(step, Plants(host=0.3, kernels={"feed_forward.w2.matmul": 2.0})).write(tmp_path / "made")
    page, device = tmp_path / "profile.html", tmp_path / "device.yaml"
    arguments = [YAML, str(tmp_path / "made"), *KEYS, "--page", str(page), "--calibrate", str(device)]
    assert main(arguments) == 0
    out, _ = capsys.readouterr()
    assert "host gaps" in out
    assert "kernel slower: look at" in out
    assert "files of devices are read as" in out
    text = page.read_text(encoding="utf-8")
    assert "What each difference is worth" in text
    assert "host gaps" in text
    before = read_device(DEFAULT).step_overhead.value
    assert read_device(str(device)).step_overhead.value == pytest.approx(0.3 + before, rel=0.01)


def test_json_has_every_cause_and_rank(step, tmp_path, capsys):
    Maker(step, Plants(begins=0.5)).write(tmp_path, {1, 6})
    assert main([YAML, str(tmp_path), *KEYS, "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert [one["cause"] for one in tree["findings"]] == ["begin"]
    assert [(one["rank"], one["stage"], one["steps"]) for one in tree["ranks"]] == [(1, 0, 1), (6, 1, 1)]
    assert "6 of 8 ranks were not recorded: they are taken to be as predicted" in tree["notes"]
    assert tree["difference"] == pytest.approx(sum(one["worth"] for one in tree["findings"]) + tree["unexplained"])


def test_the_device_that_left_a_profile_is_found_again(config, tmp_path):
    described = read_device(DEFAULT)
    true = with_constants(described, TRUTH, "the truth")
    workload = workload_of(config)
    records, _ = read_recording(Maker(step_time(workload, true)).write(tmp_path, {0, 5}))
    found = calibrated(ProfileReport(compare(step_time(workload, described), records)))
    for name, value in TRUTH.items():
        assert constants(found)[name].of(found) == pytest.approx(value, rel=0.05), name
    assert compare(step_time(workload, found), records).measured == pytest.approx(
        step_time(workload, found).seconds, rel=0.01
    )
    assert found.step_error is None
