"""A run in MindSpore's dry run: what its process needs before it starts, and before ranks connect.

``MS_SIMULATION_LEVEL=1`` executes the whole host side of a rank and launches nothing. Without Ascend's software the process
must find the stand-ins for it when it starts (see ``device/stand_in``), so it is started again with their environment.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import sys
from pathlib import Path
from typing import TextIO

from mindllm.compiled.device.callback_thread import calm_callback_thread
from mindllm.compiled.device.stand_in import device_software
from mindllm.compiled.simulation.simulate_rank import KNOWN, PIPELINED_THREADS

ENTERED = "MINDLLM_SIMULATION"
ERRORS, MEMORY_LINES = "3", "{DEVICE:2}"  # MindSpore prints the memory lines as warnings of the device when it ends


def enter_simulation() -> None:
    """Starts this program again in the environment of a simulated device; returns where that has been done.

    Raises:
        UserError: this machine, or its MindSpore, cannot simulate an Ascend device.
    """
    if os.environ.get(ENTERED):
        return
    software = device_software()
    quiet = {"GLOG_v": ERRORS, "MS_SUBMODULE_LOG_v": MEMORY_LINES, ENTERED: "1"}
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**quiet, **os.environ, **software, ENTERED: "1"})


def import_quietly() -> None:
    """Imports MindSpore without what it then says of Ascend's version and Python packages, which the stand-ins do not have.

    Its log handler keeps the standard error it finds while it is imported.
    """
    with contextlib.redirect_stderr(_WithoutKnown(sys.stderr)):
        import mindspore  # noqa: F401


class _WithoutKnown(io.TextIOBase):
    """A stream that drops messages known to be harmless."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._known = re.compile("|".join(KNOWN))

    def write(self, text: str) -> int:
        return len(text) if self._known.search(text) else self._stream.write(text)

    def flush(self) -> None:
        self._stream.flush()


def prepare_simulation() -> None:
    """Settings of MindSpore without which a simulated rank does not connect or launch; call it before ranks connect."""
    import mindspore as ms
    from mindspore.communication._comm_helper import GlobalComm

    GlobalComm.CHECK_ENVS = False
    ms.runtime.dispatch_threads_num(PIPELINED_THREADS)
    calm_callback_thread(Path(ms.__file__).parent)
    logging.getLogger(__name__).info(
        "simulation: nothing is computed, so there are no losses, norms or times of a device"
    )
