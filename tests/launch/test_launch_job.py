"""A job ends as a whole: well, failed, killed or interrupted; it says which rank it was about, and nothing is left running."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from mindllm.jobs.process import JobProcess

ROOT = Path(__file__).resolve().parents[2]
LAUNCHER = ROOT / "scripts" / "msrun_launcher.sh"
PRELUDE = """
import os, signal, sys, time
from mindllm.launch.meeting import RendezvousClient
rank, seat = int(os.environ["RANK_ID"]), RendezvousClient.inherited()
with open(f"pid_{rank}", "w") as file:
    file.write(str(os.getpid()))
"""
AGREE_TO_STOP = """
asked = []
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda number, frame: asked.append(number))
seat.sum([])
print("training", flush=True)
while not seat.sum([len(asked)])[0]:
    time.sleep(0.01)
print("saved", flush=True)
"""


def begin(script, workers=2, arguments=()):
    """Starts a job of the script in the working directory."""
    Path("job.py").write_text(PRELUDE + script)
    command = [
        sys.executable,
        "-m",
        "mindllm.launch",
        "--workers",
        str(workers),
        "--log_dir",
        "log",
        *arguments,
        "job.py a 'b c'",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ignored = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests under nohup would hand it on
    try:
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    finally:
        signal.signal(signal.SIGHUP, ignored)


def finish(process, expect):
    """What it printed; nothing of it may be left."""
    printed, _ = process.communicate(timeout=120)
    assert process.returncode == expect, printed
    assert "Traceback" not in printed
    assert_all_gone()
    return printed


def finish_with_traceback(process, expect):
    """As ``finish``, where a rank shows its traceback."""
    printed, _ = process.communicate(timeout=120)
    assert process.returncode == expect, printed
    assert_all_gone()
    return printed


def assert_all_gone():
    for file in Path().glob("pid_*"):
        deadline = time.monotonic() + 30
        while is_running(int(file.read_text())):
            assert time.monotonic() < deadline, f"{file} is left"
            time.sleep(0.05)


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for_both(text):
    for rank in range(2):
        wait_for(Path(f"log/worker_{rank}.log"), text)


def wait_for(path, text, launchers=()):
    deadline = time.monotonic() + 60
    while not path.exists() or text not in path.read_text():
        ended = [launcher.communicate()[0] for launcher in launchers if launcher.poll() is not None]
        assert not ended, ended
        assert time.monotonic() < deadline, f"no '{text}' in {path}"
        time.sleep(0.02)


def test_ranks_add_and_end_well_and_what_the_first_one_prints_is_shown():
    script = "print('sum', seat.sum([rank + 1.0, 2.0]), sys.argv[1:], os.environ['MS_ROLE'], os.environ['MS_NODE_ID'])"
    printed = finish(begin(script), 0)
    assert printed == "sum [3.0, 4.0] ['a', 'b c'] MS_WORKER 0\n"
    assert Path("log/worker_1.log").read_text().endswith("MS_WORKER 1\n")


def test_one_worker_is_no_cluster():
    assert finish(begin("print('MS_ROLE' in os.environ)", workers=1, arguments=["--timeout", "5"]), 0) == "False\n"


def test_a_rank_that_fails_before_it_meets_the_others_ends_the_job_with_its_exit_code():
    printed = finish(begin("if rank == 1:\n    sys.exit('error: no such corpus')\nseat.sum([])"), 1)
    assert "rank 1 ended with exit code 1" in printed
    assert "error: no such corpus" in printed
    assert "log/worker_1.log" in printed


def test_a_mistake_that_all_ranks_find_is_told_once():
    printed = finish(begin("print('error: wrong key', file=sys.stderr)\nsys.exit(2)"), 2)
    assert printed.count("error: wrong key") == 1
    assert re.search(r"rank \d ended with exit code 2", printed)


def test_a_rank_that_is_killed_while_others_wait_ends_the_job():
    printed = finish(begin("seat.sum([])\nif rank == 1:\n    os.kill(os.getpid(), 9)\nseat.sum([])"), 1)
    assert "rank 1 was killed by SIGKILL" in printed


def test_a_rank_that_ends_while_another_waits_for_it_ends_the_job():
    printed = finish(begin("seat.sum([])\nif rank == 0:\n    seat.sum([])"), 1)
    assert "rank 1 ended with exit code 0" in printed


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130), (signal.SIGHUP, 0)])
def test_a_signal_reaches_all_ranks_and_they_end_in_their_own_way(number, code):
    process = begin(AGREE_TO_STOP)
    wait_for_both("training")
    process.send_signal(number)
    assert "saved" in finish(process, code)
    assert "saved" in Path("log/worker_1.log").read_text()


def test_a_signal_before_training_ends_the_job_with_its_number():
    process = begin("signal.signal(signal.SIGINT, signal.SIG_DFL)\nprint('up', flush=True)\ntime.sleep(1000)")
    wait_for_both("up")
    process.send_signal(signal.SIGTERM)
    assert "nothing is saved" in finish(process, 128 + signal.SIGTERM)


def test_a_second_interrupt_ends_ranks_that_do_not_react():
    process = begin("signal.signal(signal.SIGINT, signal.SIG_IGN)\nprint('up', flush=True)\ntime.sleep(1000)")
    wait_for_both("up")
    process.send_signal(signal.SIGINT)
    while "second signal" not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    finish(process, 130)


def test_a_process_that_was_looked_at_while_an_interrupt_came_can_be_ended():
    process = JobProcess("rank 0", ["sleep", "1000"], {}, Path("log"))
    process.process._waitpid_lock = taken = TakenByAnInterrupt()
    with suppress(KeyboardInterrupt):
        process.poll()
    ending = threading.Thread(target=process.kill, daemon=True)
    ending.start()
    ending.join(timeout=30)
    taken.release()
    assert not ending.is_alive()
    assert process.poll() == -signal.SIGKILL


class TakenByAnInterrupt:
    """A lock that an interrupt finds between its being taken and what releases it."""

    def __init__(self):
        self.lock = threading.Lock()
        self.release = lambda: self.lock.locked() and self.lock.release()

    def acquire(self, blocking=True):
        self.lock.acquire(blocking)
        raise KeyboardInterrupt

    def __enter__(self):
        self.lock.acquire()

    def __exit__(self, *exception):
        self.release()


def test_ranks_die_with_their_launcher():
    process = begin("print('up', flush=True)\nseat.sum([rank * 1.0])\ntime.sleep(1000)")
    wait_for_both("up")
    process.kill()
    process.communicate()
    assert_all_gone()


def test_what_a_rank_has_started_ends_with_it():
    child = "import subprocess\nopen(f'pid_1{rank}', 'w').write(str(subprocess.Popen(['sleep', '1000']).pid))\n"
    finish(begin(child + "seat.sum([])\nsys.exit(1 if rank else 0)"), 1)
    assert len(list(Path().glob("pid_*"))) == 4


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["no_such.py", "2"], "no_such.py: no such script, neither in "),
        (["no_such.py", "2", "0", "log", "False"], "no_such.py: no such script, neither in "),
        (
            ["run_mindformer.py --config a.yaml", "8", "4", "127.0.0.1", "8118", "0", "log", "False", "3"],
            "run_llm.py reads",
        ),
        (["", "2"], "the command names no script"),
        (["job.py --prompt 'a", "2"], "a quotation in the command has no end"),
        (["job.py", "--config", "a.yaml", "2"], 'in one pair of quotes: "job.py --config ..."'),
        (["job.py", "0"], "at least 1"),
        (["job.py", "2", "99999"], "must be a port from 1 to 65535 (value 99999)"),
        (["job.py", "two"], "WORKER_NUM is 'two', not a number"),
        ([], "usage:"),
        (["job.py", "2", "0", "log", "maybe"], "write True or False"),
        (["job.py", *"123456789"], "9 arguments behind the command, of which there are 8 at most"),
        (["job.py", "2", "1", "127.0.0.1", "8118", "one", "log"], "NODE_RANK is 'one', not a number"),
        (["--restart", "many", "job.py", "2"], "--restart is 'many', not a number"),
        (["job.py", "4", "3", "127.0.0.1", "8118", "0", "log", "True", "9"], "must be a multiple"),
    ],
)
def test_wrong_arguments_are_explained(arguments, wanted):
    Path("job.py").touch()
    result = launcher(arguments)
    assert result.returncode == 2
    assert wanted in result.stderr


@pytest.mark.parametrize(
    "script", ["run_llm.py --config ", "python run_llm.py --config ", "python3.11 scripts/../run_llm.py --config ", ""]
)
def test_a_script_of_the_checkout_is_found_from_any_directory(script):
    """And a YAML alone is run by it."""
    result = launcher([f"{script}configs/llama2/pretrain_llama2_tiny.yaml --no_such_key=1", "1"])
    assert result.returncode == 2
    assert "no_such_key: unknown key" in result.stdout + result.stderr


def test_a_script_that_is_here_comes_first():
    Path("run_llm.py").write_text("print('mine')")
    result = launcher(["run_llm.py", "1"])
    assert (result.returncode, result.stdout) == (0, "mine\n")


def test_as_in_mindformers_there_are_eight_processes_where_nothing_is_said():
    Path("job.py").write_text("import os; print(os.environ['MS_WORKER_NUM'])")
    assert launcher(["job.py"]).stdout == "8\n"


def test_a_port_in_use_is_refused_before_anything_is_started():
    Path("job.py").touch()
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        result = launcher(["job.py", "2", str(other.getsockname()[1])])
    assert result.returncode == 2
    assert "cannot be used" in result.stderr
    assert not Path("output").exists()


def test_without_join_the_script_returns_and_the_job_goes_on():
    Path("job.py").write_text(PRELUDE + AGREE_TO_STOP)
    result = launcher(["job.py", "2", "0", "log", "False"])
    assert result.returncode == 0
    wait_for_both("training")
    os.kill(int(re.search(r"process (\d+)", result.stdout).group(1)), signal.SIGTERM)
    wait_for(Path("log/launch.log"), "saved")
    assert_all_gone()


def launcher(arguments):
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "VIRTUAL_ENV": sys.prefix,
    }
    return subprocess.run(
        ["bash", LAUNCHER, *arguments], env=environment, capture_output=True, text=True, timeout=120, check=False
    )


CRASH_AT_CONNECT = """
from mindllm.launch.heartbeat import heart
heart.start(60)
heart.beat("starting", 0)
seat.sum([1.0])  # as ranks do that compare their data before they connect
starts = len([name for name in os.listdir(".") if name.startswith("start_")])
if rank == 1:
    open(f"start_{starts}", "w").close()
    TRAINED and heart.beat("step 2", 1)
    if not starts:
        os.kill(os.getpid(), signal.SIGSEGV)
seat.sum([1.0])
"""


@pytest.mark.parametrize(("trained", "starts", "code"), [(False, 2, 0), (True, 1, 1)])
def test_ranks_that_have_added_numbers_but_done_no_step_are_started_again(trained, starts, code):
    printed = finish(begin(CRASH_AT_CONNECT.replace("TRAINED", str(trained))), code)
    assert len(list(Path().glob("start_*"))) == starts, printed


CRASH = """
starts = len([name for name in os.listdir(".") if name.startswith("start_")]) if rank == 1 else 0
seat.sum([])
if rank == 1:
    open(f"start_{starts}", "w").close()
    if starts < CRASHES:
        os.kill(os.getpid(), signal.SIGSEGV)
seat.sum([1.0])
if CRASHES < 0 and rank == 1:
    os.kill(os.getpid(), signal.SIGSEGV)
print("added", flush=True)
"""


@pytest.mark.parametrize(("crashes", "starts", "code"), [(0, 1, 0), (5, 6, 0), (6, 6, 1), (-1, 1, 1)])
def test_ranks_that_crash_before_their_first_step_are_started_again(crashes, starts, code):
    """And those that crash later are not: what they have done may not be done twice."""
    process = begin(CRASH.replace("CRASHES", str(crashes)))
    printed = finish(process, code)
    assert len(list(Path().glob("start_*"))) == starts
    assert printed.count("starting the ranks again") == starts - 1
    assert ("was killed by SIGSEGV; the job was ended" in printed) == (crashes != 0)
    assert ("added" in printed) == (crashes < 6)


def beats(script):
    """A script whose ranks give signs of life, one second apart at most."""
    return "from mindllm.launch.heartbeat import heart\nheart.start(1)\n" + script


HANG = beats("""
for step in range(1, 4):
    heart.beat("the next batch", step)
    seat.sum([1.0])
    heart.beat(f"step {step + 1}", step)
def stuck_in_here():
    time.sleep(1000)
if rank == 1:
    stuck_in_here()
seat.sum([1.0])
""")


def test_a_rank_that_hangs_is_named_with_the_place_and_the_last_step_of_every_rank():
    printed = finish(begin(HANG, workers=3), 1)
    assert re.search(
        r"rank 1 hangs: no sign of life for [12] s \(in step 4; runner_config.step_timeout allows 1 s\)", printed
    )
    assert "last step of each rank: 3 (ranks 0-2)" in printed
    assert "stuck_in_here" in printed


STAYS = """
from mindllm.launch.heartbeat import heart
seat.sum([1.0])
if rank == 1:
    print("Traceback of mine", flush=True)
    heart.end(1)
    time.sleep(1000)
seat.sum([1.0])
"""


def test_a_rank_that_has_told_its_error_and_does_not_leave_is_named():
    printed = finish_with_traceback(begin(STAYS), 1)
    assert re.search(r"rank 1 hangs: no sign of life for \d s \(in its end, after an error; that allows 1 s\)", printed)
    assert "Traceback of mine" in printed


def test_a_rank_that_cannot_be_joined_ends_with_its_code_and_the_job_with_it():
    script = """
import threading
from mindllm.process.end_in_time import ending_in_time
from mindllm.launch.heartbeat import heart
seat.sum([1.0])
if rank == 1:
    threading.Thread(target=time.sleep, args=(1000,)).start()
    with ending_in_time(0.5, heart.end):
        raise ValueError("ours")
seat.sum([1.0])
"""
    printed = finish_with_traceback(begin(script), 1)
    assert "rank 1 ended with exit code 1" in printed
    assert "ended: this process had failed and was still there" in printed


def test_a_rank_that_works_longer_than_a_step_may_take_but_says_so_is_not_ended():
    script = beats("for step in range(15):\n    heart.beat('x', step)\n    time.sleep(0.1)\nprint('done', flush=True)")
    assert "done" in finish(begin(script), 0)


def test_a_rank_that_dies_is_named_with_the_last_step_of_every_rank():
    script = beats("heart.beat('x', 4 + rank)\nseat.sum([1.0])\nif rank:\n    os.kill(os.getpid(), 9)\nseat.sum([1.0])")
    printed = finish(begin(script), 1)
    assert "rank 1 was killed by SIGKILL; the job was ended; last step of each rank: 5 (rank 1), 4 (rank 0)." in printed


FAIL_TWICE = """
job, attempts = os.environ["MINDLLM_JOB"], len([name for name in os.listdir(".") if name.startswith(f"start_{rank}")])
open(f"start_{rank}_{attempts}_{job}", "w").close()
seat.sum([1.0])
if rank == 1 and attempts < 2:
    sys.exit(CODE)
print("done", flush=True)
"""


@pytest.mark.parametrize(("restarts", "code", "starts", "ends"), [(3, 1, 3, 0), (1, 1, 2, 1), (3, 2, 1, 2)])
def test_a_job_that_fails_is_started_again_but_not_for_a_mistake_of_the_user(restarts, code, starts, ends):
    process = begin(FAIL_TWICE.replace("CODE", str(code)), arguments=["--restart", str(restarts)])
    printed = finish(process, ends)
    assert printed.count("going on from the last good checkpoint") == starts - 1
    names = [path.name.split("_") for path in Path().glob("start_1_*")]
    assert len(names) == starts
    assert len({name[-1] for name in names}) == 1


def test_a_job_that_is_asked_to_stop_is_not_started_again():
    script = "signal.signal(signal.SIGINT, signal.SIG_DFL)\nprint('up', flush=True)\ntime.sleep(1000)"
    process = begin(script, arguments=["--restart", "3"])
    wait_for_both("up")
    process.send_signal(signal.SIGTERM)
    assert "restart" not in finish(process, 128 + signal.SIGTERM)
