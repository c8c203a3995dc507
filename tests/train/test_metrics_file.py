"""Every line of the metrics file is strict JSON, each step appears once, and a killed writer costs at most its last line."""

import errno
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mindllm.train.metrics_file import MetricsFile, read_metrics

REPOSITORY = Path(__file__).parents[2]


def refuse_constant(name: str):
    raise ValueError(f"{name} is not JSON")


def lines(path: Path) -> list[dict]:
    return [json.loads(line, parse_constant=refuse_constant) for line in path.read_text().splitlines()]


def write_steps(path: Path, *steps: int) -> None:
    with MetricsFile(path) as metrics:
        for step in steps:
            metrics.append({"step": step, "loss": 1 / step})


def steps(path: Path) -> list[int]:
    return [record["step"] for record in lines(path)]


def test_records_appear_in_order_and_at_once(tmp_path):
    path = tmp_path / "output" / "metrics.jsonl"
    metrics = MetricsFile(path)
    metrics.append(
        {"step": 1, "loss": np.float32(2.5), "counts": np.int64(3), "overflow": np.bool_(True), "text": "ü\n"}
    )
    assert lines(path) == [{"step": 1, "loss": 2.5, "counts": 3, "overflow": True, "text": "ü\n"}]
    metrics.append({"step": np.int32(2)})
    metrics.sync()
    metrics.close()
    assert steps(path) == [1, 2]
    assert read_metrics(path) == lines(path)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), np.float32("nan"), np.float64("inf")])
def test_numbers_that_are_not_finite_are_null(tmp_path, value):
    with MetricsFile(tmp_path / "m.jsonl") as metrics:
        metrics.append({"step": 1, "loss": value, "nested": {"values": [value, 1.0]}})
    assert lines(tmp_path / "m.jsonl") == [{"step": 1, "loss": None, "nested": {"values": [None, 1.0]}}]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=50)
@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_float32_values_come_back_exactly(tmp_path, value):
    with MetricsFile(tmp_path / "m.jsonl") as metrics:
        metrics.append({"step": 1, "loss": np.float32(value)})
    assert np.float32(lines(tmp_path / "m.jsonl")[-1]["loss"]).tobytes() == np.float32(value).tobytes()


def test_a_record_without_a_step_is_refused(tmp_path):
    with MetricsFile(tmp_path / "m.jsonl") as metrics, pytest.raises(ValueError, match="integer 'step'"):
        metrics.append({"loss": 1.0})


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=50)
@given(cut=st.integers(0, 400))
def test_a_torn_last_line_is_cut_off_at_the_next_opening(tmp_path, cut):
    path = tmp_path / "m.jsonl"
    path.unlink(missing_ok=True)
    write_steps(path, *range(1, 11))
    whole = path.read_bytes()[:cut]
    path.write_bytes(whole)
    complete = whole.count(b"\n")
    assert [record["step"] for record in read_metrics(path)] == list(range(1, complete + 1))
    write_steps(path, 99)
    assert steps(path) == [*range(1, complete + 1), 99]


def test_a_torn_line_longer_than_a_block_is_cut_off(tmp_path):
    path = tmp_path / "m.jsonl"
    write_steps(path, 1)
    with open(path, "ab") as file:
        file.write(b"x" * 200_000)
    write_steps(path, 2)
    assert steps(path) == [1, 2]


def test_going_back_drops_later_steps_and_each_step_appears_once(tmp_path):
    path = tmp_path / "m.jsonl"
    write_steps(path, *range(1, 10))
    with MetricsFile(path) as metrics:
        metrics.rewind(6)
        metrics.append({"step": 7, "again": True})
    assert steps(path) == [1, 2, 3, 4, 5, 6, 7]
    assert lines(path)[-1] == {"step": 7, "again": True}
    with MetricsFile(path) as metrics:
        metrics.rewind(0)
    assert path.read_bytes() == b""
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.jsonl"]


def test_a_failed_rewind_leaves_the_file_whole(tmp_path, monkeypatch):
    path = tmp_path / "m.jsonl"
    write_steps(path, 1, 2, 3)
    metrics = MetricsFile(path)

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        metrics.rewind(1)
    metrics.append({"step": 4})
    assert steps(path) == [1, 2, 3, 4]


def test_lines_that_a_power_failure_left_are_dropped_with_a_warning(tmp_path, caplog):
    path = tmp_path / "m.jsonl"
    write_steps(path, 1, 2)
    with open(path, "ab") as file:
        file.write(b"\0\0\0\n[1]\n{}\n")
    write_steps(path, 3)
    assert [record["step"] for record in read_metrics(path)] == [1, 2, 3]
    with MetricsFile(path) as metrics:
        metrics.rewind(5)
    assert steps(path) == [1, 2, 3]
    assert "line 3 is not a metrics record" in caplog.text


def test_a_full_disk_leaves_no_part_of_a_line(tmp_path):
    path = tmp_path / "m.jsonl"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with MetricsFile(path) as metrics:
        metrics.append({"step": 1})
        resource.setrlimit(resource.RLIMIT_FSIZE, (50, hard))
        try:
            with pytest.raises(OSError, match=r"File too large: .*m\.jsonl"):
                metrics.append({"step": 2, "text": "x" * 100})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert steps(path) == [1]
        metrics.append({"step": 3})
    assert steps(path) == [1, 3]


WRITER = """
import sys
from mindllm.train.metrics_file import MetricsFile

with MetricsFile(sys.argv[1]) as metrics:
    step = int(sys.argv[2])
    while True:
        step += 1
        metrics.append({"step": step, "loss": 1 / step, "text": "x" * (step % 5000)})
        print(step, flush=True)
"""


def test_a_killed_writer_loses_no_step_it_finished(tmp_path):
    path, last = tmp_path / "m.jsonl", 0
    for _ in range(5):
        command = [sys.executable, "-c", WRITER, str(path), str(last)]
        writer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)
        first = writer.stdout.readline()
        time.sleep(0.02)
        writer.send_signal(signal.SIGKILL)
        finished = int((first + writer.communicate()[0]).split()[-1])
        MetricsFile(path).close()
        assert steps(path)[:finished] == list(range(1, finished + 1))
        last = len(steps(path))
        assert last in (finished, finished + 1)
