"""Tasks of Slurm know their place, and the file for sbatch says what it should."""

import subprocess
import sys
from pathlib import Path

import pytest

from mindllm.cli.launch import job_warnings, main
from mindllm.errors import UserError
from mindllm.launch.clusters.placement import is_rank
from mindllm.launch.clusters.schedulers import placement_of
from mindllm.launch.clusters.slurm import hosts, slurm_task
from mindllm.launch.script import command_of, own_command
from mindllm.launch.start import Launch, placed

ROOT = Path(__file__).resolve().parents[3]
RUN = f"train --config {ROOT / 'configs/llama2/pretrain_llama2_13b_16p.yaml'}"


def step(task, tasks=4, local=0, **others):
    """What a task of a step has in its environment, as srun of Slurm 22.05 sets it."""
    variables = {
        "SLURM_JOB_ID": "41",
        "SLURM_STEP_ID": "1",
        "SLURM_STEP_NUM_TASKS": str(tasks),
        "SLURM_STEP_NODELIST": "node[1-2]",
        "SLURM_PROCID": str(task),
        "SLURM_LOCALID": str(local),
    }
    return variables | others


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("node7", ["node7"]),
        ("node[1-3]", ["node1", "node2", "node3"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("a[1,3-4],b,c[2]", ["a1", "a3", "a4", "b", "c2"]),
        ("r[1-2]n[01-02]", ["r1n01", "r1n02", "r2n01", "r2n02"]),
        ("r[1-2]-eth", ["r1-eth", "r2-eth"]),
    ],
)
def test_a_host_list_is_expanded_in_its_order(text, wanted):
    assert list(hosts(text)) == wanted


@pytest.mark.parametrize("text", ["", "node[1-", "node[a-b]", "node[3-1]", "node]", "a,,b", "n[1]m]", "n[0-99999999]"])
def test_what_is_no_host_list_is_refused(text):
    with pytest.raises(UserError, match="no host list of Slurm"):
        list(hosts(text))


def test_a_task_of_a_step_has_its_place():
    place = slurm_task(step(3, local=1), find={"node1": "10.0.0.1"}.get)
    assert (place.tasks, place.task, place.local_task) == (4, 3, 1)
    assert (place.address, place.job) == ("10.0.0.1", "slurm-41.1")
    assert place.port == slurm_task(step(0), find=lambda host: "10.0.0.1").port
    assert place.port % 2 == 0


def test_address_and_port_of_the_script_come_first():
    place = slurm_task(step(1, MASTER_ADDR="10.9.9.9", MASTER_PORT="7000"), find=lambda host: "10.0.0.1")
    assert (place.address, place.port) == ("10.9.9.9", 7000)


def test_a_batch_script_is_no_task_and_one_task_looks_for_no_node():
    batch = {name: value for name, value in step(0).items() if "STEP" not in name}
    assert placement_of(batch) is None
    assert slurm_task(step(0, tasks=1), find=lambda host: pytest.fail(host)).tasks == 1


def test_a_variable_that_is_no_number_is_named():
    with pytest.raises(UserError, match="SLURM_LOCALID is ''"):
        slurm_task(step(0) | {"SLURM_LOCALID": ""}, find=lambda host: "10.0.0.1")


def test_an_address_that_nobody_knows_is_told(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match=r"address of nowhere-at-all\.invalid.*set MASTER_ADDR"):
        slurm_task(step(0, SLURM_STEP_NODELIST="nowhere-at-all.invalid"))


@pytest.mark.parametrize(
    ("tasks", "local", "visible", "ranks", "device"),
    [(2, 0, "", 8, 0), (16, 3, "", 1, 3), (16, 3, "5", 1, 0), (4, 1, "", 4, 4), (4, 1, "0,1,2,3,4,5,6,7", 4, 4)],
)
def test_ranks_and_devices_of_a_task(monkeypatch, tasks, local, visible, ranks, device):
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", visible)
    here = step(tasks - 1, tasks, local, SLURM_STEP_TASKS_PER_NODE=f"{tasks // 2}(x2)")
    place = slurm_task(here, find=lambda host: "10.0.0.1")
    launch = placed(Launch(("job.py",), 16, 16, Path("log"), Path("log"), msrun=True), place)
    assert (launch.local_workers, launch.node_rank, launch.first_device) == (ranks, tasks - 1, device)
    assert launch.ranks == range(16 - ranks, 16)
    assert (launch.master_addr, launch.msrun) == ("10.0.0.1", tasks == 2)


def test_tasks_that_cannot_share_the_ranks_are_refused():
    place = slurm_task(step(0, 3), find=lambda host: "10.0.0.1")
    with pytest.raises(UserError, match="started 3 tasks, which cannot share 16 ranks evenly"):
        placed(Launch(("job.py",), 16, 16, Path("log"), Path("log")), place)


def test_a_rank_is_not_asked_to_start_ranks():
    assert is_rank({"MS_WORKER_NUM": "4", "RANK_ID": "0"})
    assert not is_rank(step(0))


@pytest.mark.parametrize(
    "words", [["python", "-m", "mindllm", "train"], ["python", "/env/bin/mindllm", "train"], ["python3", "run_llm.py"]]
)
def test_ranks_run_the_command_of_their_task(words):
    assert own_command([*words, "run.yaml"], msrun=False) == [*words[1:], "run.yaml"]
    script, *rest = own_command([*words, "run.yaml"], msrun=True)
    assert Path(script).name == "run_llm.py"
    assert rest == ["--run_mode=train"] * ("train" in words) + ["run.yaml"]


LOOK = """
import os, sys
from mindllm.launch.meeting import RendezvousClient
print(RendezvousClient.inherited().sum([1.0]), *(os.environ[name] for name in ("RANK_ID", "DEVICE_ID", "MINDLLM_JOB")))
"""


def test_tasks_find_each_other_by_what_slurm_says(tmp_path, port):
    Path("job.py").write_text(LOOK)
    command = [sys.executable, "-m", "mindllm.launch", "--workers=2", "--log_dir=log", "--shared_dir=shared", "job.py"]
    tasks = []
    for task in range(2):
        here = step(
            task, 2, task, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), PYTHONPATH=str(ROOT), PATH="/usr/bin"
        )
        tasks.append(subprocess.Popen(command, env=here, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    printed = [task.communicate(timeout=60)[0] for task in tasks]
    assert printed[0].endswith("[2.0] 0 0 slurm-41.1\n"), printed
    assert Path("log/worker_1.log").read_text() == "[2.0] 1 1 slurm-41.1\n"


def written(capsys, *arguments):
    assert main(["--slurm", *arguments]) == 0
    return capsys.readouterr().out


def test_the_file_for_sbatch_has_the_nodes_of_the_run_and_is_shell(capsys):
    text = written(capsys, "--setup", "source set_env.sh", "--sbatch=--partition=npu", "--restart=2", RUN)
    options = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]
    assert {"--nodes=2", "--ntasks-per-node=1", "--time=24:00:00", "--requeue", "--signal=B:USR1@300"} <= set(options)
    assert {"--partition=npu", "--job-name=pretrain-llama2-13b-16p"} <= set(options)
    assert f"mindllm launch --workers=16 --restart=2 '{RUN}' &" in text
    assert text.index("source set_env.sh") < text.index("srun")
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0


def test_the_interpreter_is_that_of_the_node(capsys):
    """This machine's path of Python may not exist there."""
    assert sys.executable not in written(capsys, RUN)
    assert "srun --kill-on-bad-exit=1 python -m mindllm launch" in written(capsys, RUN)
    text = written(capsys, "--python=/opt/env 1/bin/python", RUN)
    assert "srun --kill-on-bad-exit=1 '/opt/env 1/bin/python' -m mindllm launch" in text


SHIPPED = ROOT / "configs" / "llama2" / "pretrain_llama2_13b_16p.yaml"


@pytest.mark.parametrize(
    ("base", "data_path", "mounts", "expected"),
    [
        (SHIPPED, "/path/to/corpus", (), [
            "run.yaml: base: {base} is an absolute path",
            "train_dataset.data_loader.config.data_path: /path/to/corpus is a placeholder",
            "run.yaml: not proved; mindllm prove run.yaml",
        ]),
        (SHIPPED, "data/corpus", [str(ROOT)], ["run.yaml: not proved; mindllm prove run.yaml"]),
        ("configs/llama2/pretrain_llama2_13b_16p.yaml", "/data/your_corpus", (), [
            "train_dataset.data_loader.config.data_path: /data/your_corpus is a placeholder",
            "run.yaml: not proved; mindllm prove run.yaml",
        ]),
    ],
)  # fmt: skip
def test_what_stops_a_run_on_the_nodes_is_named(base, data_path, mounts, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = f"base: {base}\ntrain_dataset: {{data_loader: {{config: {{data_path: {data_path}}}}}}}\n"
    Path("run.yaml").write_text(text)
    warnings = job_warnings(command_of("train --config run.yaml"), mounts)
    assert len(warnings) == len(expected), warnings
    for warning, beginning in zip(warnings, expected, strict=True):
        assert warning.startswith(beginning.format(base=base))


def test_an_absolute_yaml_is_named_and_warnings_do_not_reach_the_file(capsys):
    assert main(["--slurm", f"train --config {SHIPPED}"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("#!/bin/bash")
    assert "warning" not in out
    assert f"warning: --config {SHIPPED} is an absolute path" in err


@pytest.mark.parametrize(
    "words", [["--master_port", "99999"], ["--master_port=0x1"], ["--port", "many"], ["--port=-1"]]
)
def test_a_port_that_is_none_is_named_with_option_and_range(words, capsys):
    with pytest.raises(SystemExit):
        main([*words, RUN])
    value = words[-1].partition("=")[2] or words[-1]
    assert f"--port/--master-port: must be a port from 1 to 65535 (value {value})" in capsys.readouterr().err


def test_the_value_of_an_unknown_option_is_not_taken_for_the_command():
    with pytest.raises(UserError, match=r'--foo: unknown option of launch.*: "train --config FILE --foo \.\.\."'):
        main(["--foo", "3", RUN])


def test_one_task_for_each_device(capsys):
    text = written(capsys, "--tasks=device", "--local_workers=4", "--time=2-12", "--notice=60", RUN)
    assert {"#SBATCH --nodes=4", "#SBATCH --ntasks-per-node=4", "#SBATCH --time=2-12"} <= set(text.splitlines())
    assert "#SBATCH --signal=B:USR1@60" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--slurm", "--time=soon", RUN], "is no time limit of Slurm"),
        (["--slurm", "--local_workers=5", RUN], "16 processes are no multiple of 5"),
        (["--slurm", "--sbatch=--a\n--b", RUN], "one line"),
        (["--slurm", str(ROOT / "setup.py")], "--workers is missing"),
        (["--time=1:00:00", "--workers=2", RUN], "--time requires --slurm"),
    ],
)
def test_what_cannot_be_written_is_refused(arguments, message):
    with pytest.raises(UserError, match=message):
        main(arguments)
