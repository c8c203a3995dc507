"""The dashboard shows the scalars of a run: installed into its own environment, asked through its REST interface."""

import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from urllib.parse import urlencode

import pytest
from command_line import ROOT, read_lines

SCRIPT = ROOT / "scripts" / "mindinsight.sh"
API = "/v1/mindinsight/datavisual"


def ask(port, path, **query):
    """The answer of the REST interface; None while it is not there yet."""
    address = f"http://127.0.0.1:{port}{API}/{path}?{urlencode(query)}"
    try:
        with urllib.request.urlopen(address, timeout=10) as answer:
            return json.load(answer)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return None


def eventually(question, seconds=180):
    deadline = time.monotonic() + seconds
    while not (answer := question()):
        assert time.monotonic() < deadline
        time.sleep(1)
    return answer


@pytest.mark.slow
@pytest.mark.timeout(1200)  # the first time it installs
def test_the_dashboard_shows_the_scalars_of_a_run_and_ends_with_an_interrupt(finished, port):
    output, _ = finished
    process = subprocess.Popen(
        ["bash", SCRIPT, output, "--port", str(port)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        lines = []
        while "Ctrl-C" not in (line := process.stdout.readline()):
            assert line, "".join(lines)
            lines.append(line)
        assert f"http://127.0.0.1:{port}" in line
        jobs = eventually(lambda: (ask(port, "train-jobs") or {}).get("train_jobs"))
        assert [job["train_id"] for job in jobs] == ["./summary"]
        query = {"train_id": "./summary", "tag": "loss/scalar"}
        shown = eventually(lambda: (ask(port, "scalar/metadata", **query) or {}).get("metadatas"))
    finally:
        os.killpg(process.pid, signal.SIGINT)  # as the terminal does
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert ask(port, "train-jobs") is None
    records = read_lines(output / "metrics.jsonl")
    assert [item["step"] for item in shown] == [record["step"] for record in records]
    assert [item["value"] for item in shown] == pytest.approx([record["loss"] for record in records], rel=1e-6)


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ([], "usage:"),
        (["nowhere"], "nowhere is no directory"),
        (["."], "SummaryMonitor"),
        ([".", "--port", "80"], "1024 to 65535"),
        ([".", "--port"], "--port needs a number"),
        ([".", "--host=0.0.0.0"], "unknown option --host=0.0.0.0"),
    ],
)
def test_wrong_arguments_are_explained(arguments, wanted):
    result = subprocess.run(["bash", SCRIPT, *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2
    assert wanted in result.stderr
