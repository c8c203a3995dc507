"""This machine as a device: what its CPU reaches is measured, and small runs of it are predicted."""

import numpy as np
import pytest

from mindllm.accept import this_machine
from mindllm.accept.this_machine import FITTED, NOT_TOLD, TWO, Shape, described_here, llama, measure, run_of
from mindllm.architecture.parts import causal_blocks
from mindllm.cli.time import main
from mindllm.jobs.cores import cores
from mindllm.timing.configured import workload_of
from mindllm.timing.costs.operators import operator_seconds
from mindllm.timing.costs.work import product
from mindllm.timing.device import Device, read_device
from mindllm.timing.measured.calibrate import Measured, calibrate, with_constants
from mindllm.timing.step import step_seconds, step_time


@pytest.fixture
def quick(monkeypatch):
    """One small try instead of many large ones."""
    monkeypatch.setattr(this_machine, "TRIES", 1)
    monkeypatch.setattr(this_machine, "PRODUCT", 64)
    monkeypatch.setattr(this_machine, "ARRAY", 1 << 16)


def test_a_machine_that_is_described_wrongly_is_found_by_its_steps(quick, tmp_path):
    tree = described_here().model_dump()
    tree["matrix_flops"]["float32"]["value"], tree["memory_bandwidth"]["value"] = (
        1.5e11,
        2e10,
    )  # not those of a small try
    device = Device.model_validate(tree)
    truth = with_constants(
        device, {"matrix": 0.48, "half_size": 90.0, "memory": 0.5, "launch": 5e-5, "step_overhead": 0.01}, "planted"
    )
    workloads = [workload_of(run_of(shape, tmp_path / str(number)), on_cpu=True) for number, shape in enumerate(FITTED)]
    rows = [Measured("planted", workload, float(step_seconds(workload, [truth])[0])) for workload in workloads]
    found = calibrate(device, rows, "planted steps", NOT_TOLD).device
    before, after = (
        np.abs([float(step_seconds(row.workload, [one])[0]) / row.seconds - 1 for row in rows])
        for one in (device, found)
    )
    assert before.max() > 0.2
    assert after.max() < 0.03


def test_attention_of_a_cpu_is_composed_in_blocks_of_rows(tmp_path):
    config = run_of(FITTED[-1], tmp_path)
    here, elsewhere = workload_of(config, on_cpu=True), workload_of(config)
    assert elsewhere.numerics.fused_attention
    assert not here.numerics.fused_attention
    assert here.numerics.causal_blocks
    assert [causal_blocks(length) for length in (64, 128, 255, 256, 384, 512, 4096)] == [1, 1, 1, 2, 3, 4, 4]


@pytest.mark.slow
def test_runs_of_this_machine_are_predicted_by_what_others_told(tmp_path, capsys):
    output = tmp_path / "here.yaml"
    assert main(["calibrate", "--here", "--output", str(output)]) == 0
    assert "left out: mean" in capsys.readouterr().out
    device = read_device(str(output))
    assert device.device_target == "CPU"
    (row,) = measure(FITTED[:1], tmp_path / "again")
    assert 0.2 < float(step_seconds(row.workload, [device])[0]) / row.seconds < 5  # others may have the machine
    assert main(["configs/llama2/pretrain_llama2_tiny.yaml", "--device", str(output)]) == 0


def test_what_a_machine_does_not_need_beside_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["calibrate", "--here", "--measured", "steps.csv", "--output", str(tmp_path / "here.yaml")])
    assert "--here measures this machine" in capsys.readouterr().err


def test_processes_have_their_part_of_the_cores_and_exchange_behind_the_pass(quick, tmp_path):
    device = described_here()
    assert device.cores == cores()
    alone, two = (
        workload_of(run_of(Shape("", llama(256, 2, 128), 2, keys), tmp_path / name), on_cpu=True)
        for name, keys in (("alone", {}), ("two", TWO))
    )
    half = device.of_ranks(2)
    assert half.memory_bandwidth.value == device.memory_bandwidth.value / 2
    assert half.matrix_rate("float32") == device.matrix_rate("float32") / 2
    free = device.model_copy(update={"cores": None})
    assert free.of_ranks(2) is free  # each rank has a device of its own
    of_two, of_free, of_one = (
        float(step_seconds(workload, [one])[0]) for workload, one in ((two, device), (two, free), (alone, device))
    )
    assert of_two > 1.5 * of_free > 1.5 * of_one
    assert step_time(two, device).utilisation == pytest.approx(of_free / of_two * 2 * step_time(two, free).utilisation)


def test_products_in_half_precision_are_those_in_single_precision_between_casts(quick):
    device = described_here()
    single, half = (product("", 64.0, 128.0, 256.0, dtype) for dtype in ("float32", "float16"))
    numbers, share = 64 * 128 + 128 * 256 + 64 * 256, device.efficiency.float16_casts.value
    casts = 6 * numbers / (device.memory_bandwidth.value * share) + 3 * device.efficiency.launch.value
    assert operator_seconds(half, device) - operator_seconds(single, device) == pytest.approx(casts)
