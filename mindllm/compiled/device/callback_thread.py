"""Puts a thread to sleep that would take a core: in its dry run, MindSpore asks for callbacks of the device without a pause."""

from __future__ import annotations

import ctypes
from pathlib import Path

from mindllm.compiled.device.stand_in import EVERYTHING

LIBRARY = Path("lib") / "plugin" / "ascend" / "libmindspore_ascend_res_manager.so"
ASKED = "_ZN9mindspore6device6ascend19aclrtProcessReport_E"  # the std::function the thread calls
ANSWER = (
    "_ZN9mindspore6device6ascend27SimuFuncIaclrtProcessReportIiEET_i"  # what a dry run puts there: it returns at once
)
SLEEP = "stand_in_wait"


def calm_callback_thread(wheel: Path) -> bool:
    """Make the thread wait between questions; returns whether that was possible. Nothing else depends on it.

    A ``std::function`` that holds a function begins with its address. It is replaced only if it is the one known.
    """
    try:
        manager, stand_ins = ctypes.CDLL(str(wheel / LIBRARY)), ctypes.CDLL(EVERYTHING)
        asked = ctypes.c_void_p.in_dll(manager, ASKED)
        answer, sleep = (
            ctypes.cast(getattr(library, name), ctypes.c_void_p)
            for library, name in ((manager, ANSWER), (stand_ins, SLEEP))
        )
    except (OSError, AttributeError, ValueError):
        return False
    if asked.value != answer.value:
        return False
    asked.value = sleep.value
    return True
