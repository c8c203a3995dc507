"""Two nodes with devices, as far as that goes without any: msrun is a stand-in, which says what it was started with."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
NODE = """
from dataclasses import replace
from mindllm.preflight import node

node.visible_devices = lambda *directory: 2
from mindllm.accept import accept
from mindllm.accept.expected import Peak

accept.peak_of = lambda config, simulations: Peak(1, 1)
accept.simulations_here = lambda: None
accept.Wanted.size = property(lambda wanted: replace(accept.SIZES["CPU"], profiled=0))
from mindllm.cli.accept import main
from mindllm.command import run_command

run_command(main)
"""
MSRUN = """#!{python}
import json, shutil, sys, time
from pathlib import Path

options = dict(word.removeprefix("--").split("=", 1) for word in sys.argv[1:9])
output, node = Path(options["log_dir"]).parent, int(options["node_rank"])
(output / f"started_{{node}}.json").write_text(json.dumps(options))
if node == {fails}:
    sys.exit(1)
while not (output / f"started_{{1 - node}}.json").exists() or {fails} >= 0:
    time.sleep(0.1)
if node == 0:
    shutil.copy(output.parent / "reference" / "metrics.jsonl", output / "metrics.jsonl")
time.sleep(2 * node)
"""


def run(tmp_path, port, fails):
    """Exit codes, what each node has printed, and what was found."""
    program = tmp_path / "msrun"
    program.write_text(MSRUN.format(python=sys.executable, fails=fails))
    program.chmod(0o755)
    (tmp_path / "node.py").write_text(NODE)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "GLOG_v": "3"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    words = [
        sys.executable,
        "node.py",
        "--output",
        "accept",
        "--devices",
        "4",
        "--local_workers",
        "2",
        "--port",
        str(port),
    ]
    words += ["--master_addr", "127.0.0.1", "--claims", "dp", "--keep", "--json", "--node_rank"]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    nodes = [subprocess.Popen([*words, str(node)], cwd=tmp_path, env=environment, **streams) for node in range(2)]
    said = [node.communicate(timeout=120) for node in nodes]
    assert not any("Traceback" in text for each in said for text in each), said
    return [node.returncode for node in nodes], [err for _, err in said], json.loads(said[0][0])


def test_msrun_is_started_on_each_node_for_its_own_ranks(tmp_path, port):
    codes, said, tree = run(tmp_path, port, fails=-1)
    loss = next(line for line in tree["lines"] if line["figure"] == "loss")
    assert loss["verdict"] == "confirmed", (said, tree["lines"])
    assert codes == [3, 3], "its seconds are those of a CPU"
    for node in range(2):
        options = json.loads((tmp_path / "accept" / "runs" / "dp" / f"started_{node}.json").read_text())
        assert {name: value for name, value in options.items() if name != "log_dir"} == {
            "worker_num": "4", "local_worker_num": "2", "master_addr": "127.0.0.1", "master_port": str(port),
            "node_rank": str(node), "join": "True", "cluster_time_out": "1800",
        }  # fmt: skip


@pytest.mark.parametrize(
    ("fails", "told"), [(0, "dp: it has ended on node 0, whose output says why"), (1, "node 1 could not take part")]
)
def test_msrun_that_fails_on_one_node_is_ended_on_the_other(fails, told, tmp_path, port):
    codes, said, tree = run(tmp_path, port, fails)
    assert codes == [1, 1]
    assert [(line["figure"], line["verdict"]) for line in tree["lines"]] == [("run", "failed")]
    assert told in said[1 - fails]
    assert "msrun ended with exit code 1" in said[fails]
