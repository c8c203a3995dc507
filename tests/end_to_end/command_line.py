"""The command line as a user calls it, and what a run leaves behind."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STEPS = 12


def start(config_file, output, *options, cwd=None, limit=resource.RLIM_INFINITY):
    """Starts ``run_llm.py`` as a process of its own, in a working directory of its own; no file may exceed ``limit`` bytes."""
    command = [sys.executable, ROOT / "run_llm.py", "--config", config_file, f"--output_dir={output}", *options]
    environment = {**os.environ, "GLOG_v": "3", "COLUMNS": "250"}
    cwd = cwd or output.parent
    return subprocess.Popen(
        list(map(str, command)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        cwd=cwd,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY)),
    )


def run(config_file, output, *options, expect=0, typed=None, seconds=300):
    """Runs it to its end, with ``typed`` as its input; checks the exit code, and returns what it printed."""
    process = start(config_file, output, *options)
    try:
        printed, _ = process.communicate(typed, timeout=seconds)
    finally:
        process.kill()
    assert process.returncode == expect, printed
    assert "Traceback" not in printed
    return printed


def read_lines(path):
    """The objects of a JSON-lines file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def trajectory(output):
    """What must not depend on interruptions: per step loss, norm, rate, tokens."""
    keys = ("step", "epoch", "loss", "learning_rate", "global_norm", "overflow", "loss_scale", "tokens")
    return [{key: record[key] for key in keys} for record in read_lines(output / "metrics.jsonl")]
