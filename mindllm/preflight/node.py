"""What this node has: devices, memory, and a directory that a run can be written to."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from mindllm.jobs.memory import available_bytes
from mindllm.preflight.finding import Finding, bad, good, unknown
from mindllm.units import GB, GIB, MIB, counted

HOST_GB_PER_RANK = 8  # a compiling rank of a large model takes a few; data and checkpoints the rest
MIB_OF_GIB = GIB // MIB
BUSY_SHARE = 0.1  # of a device's memory, above which somebody else is at work there
MEMORY_COLUMN = re.compile(r"(\d+)\s*/\s*(\d+)\s*\|\s*$", re.MULTILINE)
CLOCK_SECONDS = 1.0
DEVICES = Path("/dev")


def present_devices(directory: Path = DEVICES) -> list[Path]:
    """Return the files of the Ascend devices of this node, in the order of their numbers."""
    return sorted(directory.glob("davinci[0-9]*"), key=lambda path: int(path.name.removeprefix("davinci")))


def visible_devices(directory: Path = DEVICES) -> int:
    """Return how many Ascend devices a process may use: those of ``ASCEND_RT_VISIBLE_DEVICES`` where it is set."""
    present, visible = present_devices(directory), os.environ.get("ASCEND_RT_VISIBLE_DEVICES")
    return min(len(present), len(visible.split(","))) if visible else len(present)


def check_devices(wanted: int, directory: Path = DEVICES) -> Iterator[Finding]:
    """Ascend devices: present, allowed, and free as far as npu-smi tells."""
    present = present_devices(directory)
    if not present:
        yield bad(
            "devices",
            f"no Ascend device is visible in {directory}",
            "Check the driver, and in a container its --device",
        )
        return
    visible = os.environ.get("ASCEND_RT_VISIBLE_DEVICES")
    count = visible_devices(directory)
    told = f"{count} of {len(present)} visible (ASCEND_RT_VISIBLE_DEVICES={visible})" if visible else f"{count} visible"
    if count < wanted:
        yield bad("devices", f"{told}, {wanted} are needed", "Lower LOCAL_WORKER, or make more devices visible")
    else:
        yield good("devices", f"{told}, {wanted} needed")
    if locked := [path.name for path in present if not os.access(path, os.R_OK | os.W_OK)]:
        yield bad("access", f"{', '.join(locked)} may not be opened", "Join the group that owns them (HwHiAiUser)")
    yield check_device_memory(_npu_smi())


def check_device_memory(listing: str) -> Finding:
    """Whether others use the devices, from what ``npu-smi info`` prints: used and all memory in MB at the end of a line."""
    found = [(int(used), int(total)) for used, total in MEMORY_COLUMN.findall(listing) if int(total) > 0]
    if not found:
        return unknown("device memory", "npu-smi tells nothing", "Look at npu-smi info yourself")
    busy = [
        f"device {index}: {used / MIB_OF_GIB:.1f} of {total / MIB_OF_GIB:.1f} GB"
        for index, (used, total) in enumerate(found)
        if used > BUSY_SHARE * total
    ]
    if busy:
        return bad("device memory", "in use: " + ", ".join(busy), "End what runs there")
    return good(
        "device memory", f"{min(total - used for used, total in found) / MIB_OF_GIB:.1f} GB free on every device"
    )


def _npu_smi() -> str:
    try:
        return subprocess.run(["npu-smi", "info"], capture_output=True, text=True, timeout=30, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def check_host_memory(ranks: int, available: int | None = None) -> Finding:
    """Memory of the host for the processes of this node."""
    free = (available_bytes() or 0 if available is None else available) / GIB
    wanted = HOST_GB_PER_RANK * ranks
    seen = f"{free:.0f} GB available for {counted(ranks, 'rank')}"
    if free < wanted:
        advice = f"Compiling a large model takes up to {HOST_GB_PER_RANK} GB in each; free some, or expect swapping"
        return unknown("host memory", seen, advice)
    return good("host memory", seen)


def check_directory(directory: Path, needed: int = 0) -> Iterator[Finding]:
    """What checkpoints need of a directory: writing, flushing, renaming, locks, the clock of its server, and room."""
    name = f".preflight-{secrets.token_hex(4)}"
    first, second = directory / name, directory / f"{name}-renamed"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with open(first, "wb") as file:
            file.write(b"whole or absent")
            file.flush()
            os.fsync(file.fileno())
            written = time.time()
            yield _check_lock(directory, file.fileno())
        first.rename(second)
        if second.read_bytes() != b"whole or absent" or first.exists():
            raise OSError("a renamed file is not what was written")
        yield good("directory", f"{directory} can be written to, flushed and renamed in")
        yield _check_file_clock(second.stat().st_mtime - written)
    except OSError as error:
        yield bad("directory", f"{directory}: {error.strerror or error}", "Give one that every node can write to")
        return
    finally:
        for path in (first, second):
            with suppress(OSError):
                path.unlink(missing_ok=True)
    yield _check_room(directory, needed)


def _check_lock(directory: Path, descriptor: int) -> Finding:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return unknown(
            "locks",
            f"{directory}: {error.strerror}",
            "Nothing keeps two runs out of one output_dir there: mount with flock",
        )
    return good("locks", "work")


def _check_file_clock(difference: float) -> Finding:
    seen = f"the file server's is {abs(difference):.1f} s {'ahead' if difference > 0 else 'behind'}"
    if abs(difference) <= CLOCK_SECONDS:
        return good("file clock", seen)
    return bad("file clock", seen, "Start chrony or ntpd on this node and on the server")


def _check_room(directory: Path, needed: int) -> Finding:
    free = shutil.disk_usage(directory).free
    seen = f"{free / GB:.1f} GB free"
    if not needed:
        return good("room", f"{seen}; --config says how much a run needs")
    if free < needed:
        missing = f"{(needed - free) / GB:.1f} GB are missing"
        return bad(
            "room", f"{seen}, the run's checkpoints need {needed / GB:.1f} GB", f"{missing}; lower keep_checkpoint_max"
        )
    return good("room", f"{seen}, the run's checkpoints need {needed / GB:.1f} GB")
