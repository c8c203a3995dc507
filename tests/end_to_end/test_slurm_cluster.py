"""Runs started by a real Slurm: a controller, and a daemon for each of two nodes that this machine pretends to be."""

import os
import secrets
import shutil
import socket
import subprocess
import sys
import time

import pytest
from command_line import ROOT, read_lines, run, trajectory

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scancel")
MISSING = [name for name in PROGRAMS if not shutil.which(name)]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"no Slurm here ({', '.join(MISSING)}): apt-get install slurm-wlm munge"),
    pytest.mark.skipif(os.geteuid() != 0, reason="the daemons of Slurm are started as root"),
]
FOUR = ("--use_parallel=true", "--parallel_config.data_parallel=4", "--batch_size=1", "--eval_dataset.batch_size=1")
LONG = ("--runner_config.train_steps=100000", "--lr_schedule.total_steps=100")
CONFIGURATION = """
ClusterName=laptop
SlurmctldHost={host}(127.0.0.1)
AuthType=auth/munge
AuthInfo=socket={place}/munge.socket
SlurmUser=root
SlurmctldPort={ports[0]}
StateSaveLocation={place}/state
SlurmdSpoolDir={place}/spool.%n
SlurmctldPidFile={place}/slurmctld.pid
SlurmdPidFile={place}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
KillWait=60
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2
NodeName=node2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def free_ports(count):
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """The environment of commands of a Slurm of its own."""
    place = tmp_path_factory.mktemp("slurm")
    place.chmod(0o755)
    (place / "munge.key").write_bytes(secrets.token_bytes(128))
    (place / "munge.key").chmod(0o600)
    for name in ("state", "spool.node1", "spool.node2"):
        (place / name).mkdir()
    file = place / "slurm.conf"
    file.write_text(CONFIGURATION.format(host=socket.gethostname(), place=place, ports=free_ports(3)))
    environment = {**os.environ, "SLURM_CONF": str(file), "PYTHONPATH": str(ROOT), "COLUMNS": "250", "GLOG_v": "3"}
    own = [
        f"--{name}={place}/munge.{name.partition('-')[0]}" for name in ("key-file", "socket", "pid-file", "log-file")
    ]
    commands = [["munged", "--foreground", "--force", *own, f"--seed-file={place}/munge.seed"], ["slurmctld", "-D"]]
    commands += [["slurmd", "-D", "-N", node] for node in ("node1", "node2")]
    daemons = []
    try:
        for command in commands:
            with open(place / f"{command[0]}.{len(daemons)}.log", "wb") as log:
                streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
                daemons.append(subprocess.Popen(command, env=environment, **streams))
            time.sleep(1)
        wait_until(lambda: said(environment, "sinfo", "-h", "-t", "idle", "-o", "%D") == "2", place)
        yield environment
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait(timeout=30)


def said(environment, *command):
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False).stdout.strip()


def wait_until(true, told, seconds=120):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, told
        time.sleep(0.3)


def submit(environment, directory, script):
    """Submits a file; the number of the job."""
    (directory / "job.sh").write_text(script)
    return subprocess.run(
        ["sbatch", "--parsable", f"--chdir={directory}", f"--output={directory}/job.log", directory / "job.sh"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()


def state_of(environment, job):
    found = said(environment, "scontrol", "show", "job", job, "--oneliner")
    return dict(word.split("=", 1) for word in found.split() if "=" in word)


def command_of(config_file, output, *options):
    return f"train --config {config_file} --output_dir={output} {' '.join([*FOUR, *options])}"


def test_two_tasks_on_each_of_two_nodes_have_the_losses_of_one_device(slurm, config_file, tmp_path):
    run(config_file, tmp_path / "one")
    words = command_of(config_file, tmp_path / "four").split()
    command = ["srun", "--nodes=2", "--ntasks-per-node=2", sys.executable, "-m", "mindllm", *words]
    done = subprocess.run(command, env=slurm, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    mine, theirs = trajectory(tmp_path / "four"), trajectory(tmp_path / "one")
    assert [record["step"] for record in mine] == [record["step"] for record in theirs]
    assert [record["loss"] for record in mine] == pytest.approx([record["loss"] for record in theirs], abs=1e-5)


def written(config_file, output, *options):
    """What ``mindllm launch --slurm`` writes for two nodes of two devices."""
    command = [sys.executable, "-m", "mindllm", "launch", "--slurm", "--local_workers=2", f"--log_dir={output}_log"]
    words = [*command, *options, command_of(config_file, output, *LONG)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(words, env=environment, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(("tasks", "how"), [("node", ["--signal=TERM"]), ("device", [])])
def test_scancel_stops_all_after_the_same_step_with_a_checkpoint(slurm, config_file, tmp_path, tasks, how):
    output = tmp_path / "out"
    job = submit(slurm, tmp_path, written(config_file, output, f"--tasks={tasks}"))
    wait_until((output / "checkpoint" / "llm-2").is_dir, "no checkpoint")
    subprocess.run(["scancel", *how, job], env=slurm, check=True)
    wait_until(lambda: not said(slurm, "squeue", "-h"), "the job does not end")
    assert state_of(slurm, job)["JobState"] == ("COMPLETED" if how else "CANCELLED")
    last = read_lines(output / "metrics.jsonl")[-1]["step"]
    assert (output / "checkpoint" / f"llm-{last}").is_dir()
    for rank in range(4):
        assert f"stopping after step {last}: SIGTERM" in (output / "log" / f"rank_{rank}" / "info.log").read_text()


def test_before_the_time_is_over_a_checkpoint_is_saved_and_the_job_queued_again(slurm, config_file, tmp_path):
    output = tmp_path / "out"
    job = submit(slurm, tmp_path, written(config_file, output))
    wait_until((output / "checkpoint" / "llm-2").is_dir, "no checkpoint")
    subprocess.run(["scancel", "--batch", "--signal=USR1", job], env=slurm, check=True)  # as Slurm does by itself
    wait_until(lambda: state_of(slurm, job).get("Restarts") == "1", "the job is not queued again")
    last = read_lines(output / "metrics.jsonl")[-1]["step"]
    assert (output / "checkpoint" / f"llm-{last}").is_dir()
    log = output / "log" / "rank_0" / "info.log"
    wait_until(lambda: f"resumed from {output}/checkpoint/llm-{last}" in log.read_text(), "it does not go on", 280)
    subprocess.run(["scancel", job], env=slurm, check=True)
    wait_until(lambda: not said(slurm, "squeue", "-h"), "the job does not end")
    steps = [record["step"] for record in read_lines(output / "metrics.jsonl")]
    assert steps == list(range(1, len(steps) + 1))


def test_an_acceptance_takes_a_process_of_each_node(slurm, tmp_path):
    command = ["srun", "--nodes=2", "--ntasks-per-node=1", sys.executable, "-m", "mindllm", "accept"]
    words = [*command, "--claims", "dp,tp", "--output", str(tmp_path / "accept"), "--keep"]
    done = subprocess.run(words, env=slurm, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "node 1: takes part in dp" in done.stderr
    assert "no device, losses alone on 2 nodes, predictions for Atlas 800T A2: 2 confirmed" in done.stdout
    assert (tmp_path / "accept" / "runs" / "dp" / "launch_1" / "worker_1.log").is_file()
