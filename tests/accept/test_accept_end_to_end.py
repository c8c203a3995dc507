"""`mindllm accept` as a user calls it, on processes of this machine; what a device would do is not run."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(any(Path("/dev").glob("davinci[0-9]*")), reason="there are devices"),
]


def start(output, *options):
    command = [sys.executable, "-m", "mindllm", "accept", "--output", str(output), "--json", *options]
    environment = {**os.environ, "GLOG_v": "3", "HUSH_TOKEN": "tr0ub4dor"}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=output.parent
    )  # fmt: skip


def ended(process, expect, seconds=500):
    try:
        out, err = process.communicate(timeout=seconds)
    finally:
        process.kill()
    assert process.returncode == expect, err
    assert "Traceback" not in err
    return json.loads(out), err


def members(output):
    with zipfile.ZipFile(output / "acceptance.zip") as archive:
        return {name: archive.read(name).decode() for name in archive.namelist()}


def ranks_below(directory):
    """Commands of living processes that name a directory."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if str(directory) in words and path.parent.name != str(os.getpid()):
            found.append(words)
    return found


def test_processes_ranks_in_lockstep_and_a_resumed_checkpoint(tmp_path):
    output = tmp_path / "accept"
    tree, err = ended(start(output, "--claims", "single,dp,pp,resume"), 0)
    assert "No Ascend device is here" in err
    verdicts = {claim["claim"]: claim["verdict"] for claim in tree["claims"]}
    assert verdicts == {"single": "not judged", "dp": "confirmed", "pp": "confirmed", "resume": "confirmed"}
    losses = {line["claim"]: line for line in tree["lines"] if line["figure"] == "loss"}
    assert all(losses[name]["detail"]["largest_difference"] < 1e-5 for name in ("dp", "pp", "resume"))
    assert losses["resume"]["why"].startswith("steps 3 to 4 ")
    peaks = [line["predicted"] for line in tree["lines"] if line["figure"] == "used peak"]
    assert all(1e8 < peak < 1e10 for peak in peaks)
    assert len(peaks) == 3
    for name, text in members(output).items():
        words = (str(tmp_path), "/home/", "/tmp/", "127.0.0.1", "tr0ub4dor", f'"{socket.gethostname()}"')
        assert [word for word in words if word in text] == [], name
    assert not (output / "runs").exists()


def test_ctrl_c_stops_all_ranks_and_keeps_what_is_done(tmp_path):
    output = tmp_path / "accept"
    process = start(output, "--claims", "single,dp", "--keep")
    deadline = time.monotonic() + 200
    while not list(output.glob("runs/dp/launch/worker_1.log")) and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    tree, _ = ended(process, 130, 100)
    assert {claim["claim"]: claim["verdict"] for claim in tree["claims"]} == {"single": "not judged", "dp": "not run"}
    assert tree["lines"][-1]["why"] == "stopped while it ran"
    assert "runs/reference.jsonl" in members(output)
    assert ranks_below(output) == []
