"""Why a program told nothing about its memory: one line."""

from __future__ import annotations

import re
import signal
from pathlib import Path

from mindllm.compiled.foreign.environment import LOG, Report
from mindllm.errors import UserError, shortened
from mindllm.launch.process import ending

LONGEST = 300  # of a program's own message
OF_CANN = frozenset(
    {
        "acl", "te", "tbe", "hccl", "aclruntime", "auto_tune", "auto_search", "opc_tool", "op_compile_tool", "op_test_frame",
        "schedule_search", "asc_op_compile_base", "ais_bench", "llm_datadist", "dataflow", "mspti", "msprof", "torch_npu",
    }
)  # fmt: skip
COMPILER_OF_CANN = re.compile(r"Load backend failed")  # what MindSpore says where GE is asked for
STACK = re.compile(r"^\s*-{4,}|^\s*- C\+\+|^\s*$")


def ended_without_training(directory: Path, report: Report | None, code: int, rank: int) -> UserError:
    """What to say of a rank that has not run a training graph; its log is in ``directory``."""
    return UserError(f"rank {rank}: {_reason(report, code)}; its output is in {directory / LOG}")


def _reason(report: Report | None, code: int) -> str:
    if report is None:
        return _without_report(code)
    if report.missing and report.missing.partition(".")[0] in OF_CANN:
        name = report.missing.partition(".")[0]
        return f"the program needs {name}, a Python package of CANN, which nothing stands in for"
    if report.mindspore is None:
        return f"the program {_failed(report) or ending(code)} before it imported MindSpore"
    if report.target not in (None, "Ascend"):
        return f"the program asks for device_target {report.target}; only Ascend is simulated"
    if failed := _failed(report):
        return f"the program {failed}"
    if report.mode == "pynative":
        return (
            "the program ran in PyNative mode, operator by operator, where nothing is compiled that could be simulated; "
            "set_context(mode=GRAPH_MODE), or put the training step into mindspore.jit"
        )
    return f"the program {ending(code)} and never trained: it ran no graph with a backward pass"


def _without_report(code: int) -> str:
    if code == -signal.SIGKILL:
        return "the program was killed by SIGKILL; this machine may be out of memory: end other programs, or write --workers 1"
    return f"the program {ending(code)}, and no Python of it came to its end"


def _failed(report: Report) -> str:
    """``failed with ValueError: …``, the first line of the message; empty where it did not."""
    if report.error is None:
        return ""
    kind, text = report.error
    first = next((line.strip() for line in text.splitlines() if not STACK.match(line)), "")
    if COMPILER_OF_CANN.search(text):
        asked = "asks for the compiler of CANN (jit_level O2), which is not in MindSpore; write O0 or O1"
        return f"{asked} ({shortened(first, LONGEST)})"
    return f"failed with {kind}: {shortened(first, LONGEST)}"
