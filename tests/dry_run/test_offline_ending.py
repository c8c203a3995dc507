"""Why a program told nothing about its memory, in one line, from what it reported."""

from dataclasses import replace

import pytest

from mindllm.programs.environment import LOG, Report
from mindllm.programs.simulate import not_trained

WELL = Report(
    mindspore="2.10.0", mode="graph", target="Ascend", limit=None, trained=False, stages=1, devices=1, compile_seconds=0.0,
    host_bytes=1, error=None, missing=None,
)  # fmt: skip
GE = ("RuntimeError", "Load backend failed, please make sure the backend:1 is correct.\n\n----\n- C++ Call Stack")
LONG = ("ValueError", "\n\n  x" + "y" * 1000)


@pytest.mark.parametrize(
    ("report", "code", "said"),
    [
        (None, -9, "killed by SIGKILL; this machine may be out of memory: end other programs, or use --workers 1"),
        (None, -11, "the program was killed by SIGSEGV, and none of its Python processes ended normally"),
        (WELL, 0, "ended with exit code 0 and never trained"),
        (replace(WELL, mindspore=None), 1, "ended with exit code 1 before it imported MindSpore"),
        (replace(WELL, mode="pynative"), 0, "ran in PyNative mode"),
        (replace(WELL, target="GPU"), 0, "sets device_target GPU; only Ascend is simulated"),
        (replace(WELL, error=("ModuleNotFoundError", "No module named 'te.tik'"), missing="te.tik"), 1, "needs te, a Python"),
        (replace(WELL, error=("ModuleNotFoundError", "No module named 'deepspeed'"), missing="deepspeed"), 1, "failed with Mod"),
        (replace(WELL, error=GE), 1, "needs the compiler of CANN (jit_level O2)"),
        (replace(WELL, error=LONG), 1, "failed with ValueError: xyyy"),
    ],
)  # fmt: skip
def test_the_reason_is_one_line(tmp_path, report, code, said):
    error = not_trained(tmp_path, report, code, 3)
    assert error.exit_code == 2
    assert said in str(error)
    assert str(error).startswith("rank 3: ")
    assert str(error).endswith(str(tmp_path / LOG))
    assert "\n" not in str(error)
    assert len(str(error)) < 600 + len(str(tmp_path))
