"""Programs as people write them: each keeps its graph, all its ranks are executed, and held against itself on one device."""

import json

import pytest
from programs_people_write import BY_OPTIMIZER, FAULTS, OPTIMIZERS, PROGRAMS, write

from mindllm.cli.check import main as check
from mindllm.cli.offline import main as offline
from tests.compiled.simulations import needs_compiler

BODIES = {**PROGRAMS, **{f"by {name}": BY_OPTIMIZER.replace("OPTIMIZER", text) for name, text in OPTIMIZERS.items()}}
QUICK = (
    "jit function"  # the one proof of a step under jit and of the program on one device that is run with every change
)
IN_HALF = {"fixed loss scale"}  # amp_level O2: products in fp16
OF_ITS_PART = {"by lamb": "Lamb of first", "by adafactor": "ReduceMean on rank 0 at Default/optimizer-AdaFactor/"}
"""Optimizers that take a norm or a mean of a weight, which on a rank are those of its part: where each differs."""


def kept_and_checked(directory, body, capsys, devices=2):
    """The exit code of the check of all ranks, and what it and the dry run say."""
    keep = directory / "kept"
    command = write(directory / "train.py", body)
    assert offline(["--devices", str(devices), "--ranks", "all", "--keep", str(keep), "--", *command]) == 0
    said = capsys.readouterr().out
    code = check(["--program", str(keep), "--json"])
    return code, json.loads(capsys.readouterr().out), said


@needs_compiler
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == QUICK else pytest.mark.slow) for name in BODIES]
)
def test_all_ranks_compute_what_the_program_does_on_one_device(tmp_path, capsys, name):
    code, found, said = kept_and_checked(tmp_path, BODIES[name], capsys)
    assert found["compared"], said
    if name in OF_ITS_PART:
        assert code == 3
        assert found["place"].startswith(OF_ITS_PART[name])
        return
    assert (code, found["problems"]) == (0, [])
    assert max(found["errors"].values()) < (1e-2 if name in IN_HALF else 1e-5)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "place"), [("loss over the devices", "Divs"), ("gradients not averaged", "AllReduce")]
)
def test_a_fault_that_depends_on_the_number_of_devices_is_found_and_located(tmp_path, capsys, name, place):
    code, found, _ = kept_and_checked(tmp_path, FAULTS[name], capsys)
    assert code == 3
    assert place in found["place"].splitlines()[0]


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("name", ["loss beside something else", "gradients not averaged"])
def test_gradients_that_are_sums_in_place_of_means_are_called_so(tmp_path, capsys, name):
    """As in MindSpore's own samples of optimizer parallel and sharding propagation, with 8 devices 8 times as much."""
    code, found, _ = kept_and_checked(tmp_path, FAULTS[name], capsys)
    assert code == 3
    assert any(
        line.startswith("step 1: what changes otherwise changes 2 times as much: ") for line in found["problems"]
    )


REFUSES = """
    if devices < 2:
        raise ValueError("at least 2 devices")
    ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)
    net = Net()
    ms.Model(net, nn.CrossEntropyLoss(), nn.SGD(net.trainable_params(), 0.1)).train(1, dataset(8))
"""


@needs_compiler
@pytest.mark.slow
def test_a_program_that_refuses_one_device_is_checked_without_one_and_says_why(tmp_path, capsys):
    code, found, said = kept_and_checked(tmp_path, REFUSES, capsys)
    why = "the program failed with ValueError: at least 2 devices"
    assert f"the program did not run on one device: rank 0: {why}" in said.replace("\n", " ")
    assert (code, found["compared"]) == (0, False)
    assert why in found["not_alone"]
