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
    assert (code, found["problems"]) == (0, [])
    assert max(found["errors"].values()) < 1e-4


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(("name", "place"), [("loss over the devices", "Div"), ("gradients not averaged", "AllReduce")])
def test_a_fault_that_depends_on_the_number_of_devices_is_found_and_located(tmp_path, capsys, name, place):
    code, found, _ = kept_and_checked(tmp_path, FAULTS[name], capsys)
    assert code == 3
    assert place in found["place"].splitlines()[0]
