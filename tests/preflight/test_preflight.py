"""A node is checked before a run: what is good, what is not and what to do; a second node finds the first."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from mindllm.cli import preflight as command
from mindllm.preflight import node, versions
from mindllm.preflight.network import answer_nodes, ask_master, check_ports
from mindllm.preflight.versions import check_cann, check_driver, check_mindspore, check_python, find_version
from mindllm.versions import MINDSPORE, MINDSPORE_RELEASE

ROOT = Path(__file__).parents[2]
TINY = ROOT / "configs" / "llama2" / "pretrain_llama2_tiny.yaml"
LARGE = ROOT / "configs" / "llama2" / "pretrain_llama2_13b.yaml"


def run(*arguments):
    script = ["bash", str(ROOT / "scripts" / "preflight.sh"), *map(str, arguments)]
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "VIRTUAL_ENV": sys.prefix,
    }
    return subprocess.run(script, capture_output=True, text=True, env=environment, timeout=60, check=False)


def test_a_run_on_cpu_needs_no_device(tmp_path, port):
    result = run(TINY, "--directory", tmp_path, "--port", port)
    assert result.returncode == 0, result.stdout
    assert "not needed: context.device_target is CPU" in result.stdout
    assert not list(tmp_path.iterdir())


def test_paths_are_those_of_where_it_is_called(tmp_path, port, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(f"base: {TINY}\noutput_dir: mine\n")
    result = run("mine.yaml", "--port", port)
    assert "mine can be written to" in result.stdout


@pytest.mark.skipif(any(Path("/dev").glob("davinci[0-9]*")), reason="there are devices")
def test_without_a_device_it_says_so_and_ends_with_3(tmp_path, port):
    result = run(LARGE, "--directory", tmp_path, "--port", port, "--json")
    assert result.returncode == 3
    findings = {item["subject"]: item for item in json.loads(result.stdout)["findings"]}
    assert findings["devices"]["state"] == "no"
    assert "no Ascend device is visible" in findings["devices"]["seen"]
    assert findings["MindSpore"]["state"] == "good"
    assert "not ready: " in result.stderr


def test_wrong_input_is_explained():
    assert run().returncode == 2
    assert run(TINY, 4, 3, "127.0.0.1", 8118, 0).returncode == 2
    with pytest.raises(SystemExit, match="2"):
        command.main(["--workers", "many"])


@pytest.mark.parametrize(("found", "state"), [((3, 9), "no"), ((3, 10), "good"), ((3, 12), "good"), ((3, 13), "no")])
def test_python(found, state):
    assert check_python(found).state == state


@pytest.mark.parametrize(("found", "state"), [("2.10.0", "good"), ("2.10.1", "good"), ("2.9.0", "no"), ("2.1.0", "no")])
def test_mindspore(found, state):
    assert check_mindspore(found).state == state


@pytest.mark.parametrize(
    ("mindspore", "cann", "driver", "state"),
    [
        ("2.7.1", "8.3.RC1", "25.3.RC1", "good"),
        ("2.7.1", "8.3.rc1", "25.3.rc1", "good"),
        ("2.7.1", "8.3.0", "25.3.0", "no"),
        ("2.10.0", "8.5.0", "25.5.0", "no"),
        ("2.10.0", "9.0.0", "26.0.RC1", "unknown"),
        ("2.10.0", "9.1.0", "26.0.0", "unknown"),
        ("2.10.0", "", "", "no"),
    ],
)
def test_cann_and_driver_beside_mindspore(mindspore, cann, driver, state):
    assert check_cann(mindspore, cann).state == check_driver(mindspore, driver).state == state


def test_what_is_missing_is_said_of_the_version_that_is_installed():
    for found in (check_cann("2.10.0", ""), check_cann("2.10.0", "8.5.0"), check_cann("2.10.0", "9.1.0")):
        assert "known here for MindSpore 2.10.0; 2.9.0 goes with 9.0.0: take that or later" in found.line()
    assert "MindSpore 2.9.0 goes with 9.0.0" in check_cann("2.9.0", "").line()


def test_the_version_is_that_of_the_package():
    wanted = re.search(r'"mindspore>=([\d.]+),', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert wanted[1] == MINDSPORE
    assert check_mindspore(MINDSPORE_RELEASE).state == "good"
    assert f"mindllm runs on {MINDSPORE}: pip install 'mindllm[all]' installs it" in check_mindspore("2.1.0").line()


@pytest.mark.parametrize(
    "text", ["version=8.2.RC1\n", "package=x\nVersion=8.2.RC1", "[8.1.RC1:8.2.RC1]\nversion: 8.2.RC1\n"]
)
def test_an_installation_says_its_version(tmp_path, text):
    info = tmp_path / "aarch64-linux" / "ascend_toolkit_install.info"
    info.parent.mkdir()
    info.write_text(text)
    assert find_version([str(tmp_path / "none"), str(tmp_path)], versions.CANN_FILES) == "8.2.RC1"


def devices(tmp_path, count):
    for index in range(count):
        (tmp_path / f"davinci{index}").touch()
    (tmp_path / "davinci_manager").touch()
    return tmp_path


def test_devices_are_counted(tmp_path, monkeypatch):
    monkeypatch.delenv("ASCEND_RT_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(node, "_npu_smi", lambda: "")
    first, memory = node.check_devices(8, devices(tmp_path, 8))
    assert (first.state, first.seen) == ("good", "8 visible, 8 needed")
    assert memory.state == "unknown"
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "0,1")
    assert "2 of 8 visible (ASCEND_RT_VISIBLE_DEVICES=0,1), 8 are needed" in next(node.check_devices(8, tmp_path)).seen


LISTING = """
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| 0     910B1               | OK            | 90.1        37                0    / 0             |
| 0                         | 0000:C1:00.0  | 0           0    / 0          {used} / 65536         |
"""


def test_a_device_that_others_use_is_named():
    assert node.check_device_memory(LISTING.format(used=3362)).state == "good"
    busy = node.check_device_memory(LISTING.format(used=50000))
    assert busy.state == "no"
    assert "48.8 of 64.0 GB" in busy.seen


def test_little_memory_of_the_host_is_told_and_keeps_nobody_from_trying():
    assert node.check_host_memory(8, 100 * node.GB).state == "good"
    assert node.check_host_memory(8, 10 * node.GB).state == "unknown"


def states(findings):
    return {finding.subject: finding.state for finding in findings}


def test_a_directory_that_can_be_used_and_one_that_cannot(tmp_path):
    assert set(states(node.check_directory(tmp_path / "new")).values()) == {"good"}
    (tmp_path / "file").touch()
    found = list(node.check_directory(tmp_path / "file"))
    assert states(found) == {"directory": "no"}
    assert states(node.check_directory(tmp_path, 10**18))["room"] == "no"


def test_a_clock_of_the_file_server_that_is_off_is_told():
    assert node._check_file_clock(0.3).state == "good"
    assert "90.0 s behind" in node._check_file_clock(-90).seen


def test_a_port_in_use_is_named(port):
    assert [finding.state for finding in check_ports("127.0.0.1", port)] == ["good", "good"]
    with socket.create_server(("127.0.0.1", port)):
        assert [finding.state for finding in check_ports("127.0.0.1", port)] == ["no", "good"]


def both(port, first, second, timeout=20.0):
    """The findings of node 0 and node 1, checked at the same time."""
    answers = []
    thread = threading.Thread(target=lambda: answers.extend(answer_nodes("127.0.0.1", port, 2, first, timeout)))
    thread.start()
    asked = list(ask_master("127.0.0.1", port, 1, second, timeout))
    thread.join()
    return answers, asked


def test_two_nodes_find_each_other_their_clocks_and_their_directory(tmp_path, port):
    answers, asked = both(port, tmp_path, tmp_path)
    assert states(answers) == {"nodes": "good"}
    assert states(asked) == {"master": "good", "clock": "good", "shared directory": "good"}
    assert not list(tmp_path.iterdir())


def test_a_directory_that_is_not_shared_is_found_out(tmp_path, port, monkeypatch):
    monkeypatch.setattr("mindllm.preflight.network.RETRY_SECONDS", 0.01)
    (tmp_path / "other").mkdir()
    _, asked = both(port, tmp_path, tmp_path / "other")
    assert states(asked)["shared directory"] == "no"


def test_a_clock_that_is_off_is_found_out():
    from mindllm.preflight.network import _check_clock

    assert _check_clock(-0.4).state == "good"
    found = _check_clock(12.0)
    assert (found.state, found.seen) == ("no", "node 0 is 12.00 s ahead")


def test_nodes_that_are_alone_say_so(tmp_path, port):
    (found,) = answer_nodes("127.0.0.1", port, 3, tmp_path, 0.2)
    assert "node 1, 2 has not asked" in found.seen
    (found,) = ask_master("127.0.0.1", port, 1, tmp_path, 0.2)
    assert "does not answer: Connection refused" in found.seen


@pytest.mark.parametrize(
    "said", [b"", b"[]\n", b"hello\n", b'{"node": [1]}\n', b'{"node": 7}\n', b"x" * 100_000, b"[" * 5000 + b"\n"]
)
def test_strangers_on_the_port_neither_end_nor_delay_the_check(said, tmp_path, port, monkeypatch):
    monkeypatch.setattr("mindllm.preflight.network.ANSWER_SECONDS", 2.0)  # those who are silent are waited for as long
    answers = []
    thread = threading.Thread(target=lambda: answers.extend(answer_nodes("127.0.0.1", port, 2, tmp_path, 20.0)))
    thread.start()
    strangers = []
    while len(strangers) < 3:
        with contextlib.suppress(OSError):
            strangers.append(socket.create_connection(("127.0.0.1", port), timeout=1))
            strangers[-1].sendall(said)
    assert states(ask_master("127.0.0.1", port, 1, tmp_path, 20.0))["master"] == "good"
    thread.join()
    assert states(answers) == {"nodes": "good"}
    for stranger in strangers:
        stranger.close()
