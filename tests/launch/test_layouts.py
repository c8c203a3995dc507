"""A plan book at the launcher: a start or restart that finds fewer nodes takes the layout for those."""

import signal
from pathlib import Path

import pytest
from test_launch_job import wait_for
from test_launch_nodes import begin, finish

from mindllm.cli.launch import main
from mindllm.errors import UserError
from mindllm.launch.clusters.placement import Placement
from mindllm.launch.layouts import LayoutBook, read_book
from mindllm.launch.start import Launch, in_layout, placed, refuse_impossible

UNTIL_ENOUGH_ARE_LOST = """
print("up", sys.argv[2], os.environ["MS_WORKER_NUM"], flush=True)
seat.sum([1.0])
if int(os.environ["MS_WORKER_NUM"]) > 2:
    time.sleep(1000)
print("done", sys.argv[2], rank, seat.sum([rank]), flush=True)
"""


def a_book(**layouts):
    layouts = {int(devices.removeprefix("for_")): Path(name) for devices, name in layouts.items()}
    book = LayoutBook(Path("run.book.yaml"), 2, 32, layouts)
    book.write()
    return book


def wait_for_start(launchers, workers, *ranks):
    for node, rank in ranks:
        wait_for(Path(f"log_{node}/worker_{rank}.log"), f"up run_{workers}.yaml {workers}", launchers)


def test_a_book_is_read_as_it_was_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written = a_book(for_16="run.yaml", for_8="run.spare_1.yaml")
    assert read_book(written.path) == written
    assert [written.fitting(devices, 8) for devices in (24, 16, 15, 8, 7)] == [16, 16, 8, 8, None]
    assert written.fitting(16, 16) == 16
    assert written.fitting(12, 6) is None


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[", "no YAML"),
        ("[1]", "no plan book"),
        ("node_devices: 8\nglobal_batch: 2\nlayouts: {}", "layouts: name the YAML"),
        ("node_devices: 0\nglobal_batch: 2\nlayouts: {8: a.yaml}", "node_devices: 0 is no whole number"),
        ("node_devices: 8\nglobal_batch: [2]\nlayouts: {8: a.yaml}", "global_batch: a list is no whole number"),
        ("node_devices: 8\nglobal_batch: 2\nlayouts: {8: ../a.yaml}", "'../a.yaml' is no file beside the book"),
        ("node_devices: 8\nglobal_batch: 2\nlayouts: {true: a.yaml}", "layouts: True is no whole number"),
        ("a: &a [*a]", "no plan book"),
    ],
)
def test_what_is_no_book_is_refused_by_its_key(tmp_path, text, told):
    path = tmp_path / "book.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as refused:
        read_book(path)
    assert f"--book {path}" in str(refused.value)
    assert told in str(refused.value)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["x.py", "--config", "run.yaml", "--seed=1"], ["x.py", "--config", "spare.yaml", "--seed=1"]),
        (["x.py", "--seed=1", "--config=run.yaml"], ["x.py", "--seed=1", "--config=spare.yaml"]),
        (["x.py", "--run_mode=train", "run.yaml"], ["x.py", "--run_mode=train", "spare.yaml"]),
    ],
)
def test_a_layout_takes_the_place_of_the_run_s_yaml(words, expected):
    book = LayoutBook(Path("b.yaml"), 8, 32, {16: Path("run.yaml"), 8: Path("spare.yaml")})
    assert book.command(words, 8) == expected
    assert book.command(expected, 16) == words


def test_a_run_that_the_book_does_not_know_is_refused():
    book = LayoutBook(Path("b.yaml"), 8, 32, {16: Path("run.yaml")})
    with pytest.raises(UserError, match=r"the run is other.yaml, which is none of its layouts: run.yaml"):
        book.command(["x.py", "--config", "other.yaml"], 16)


def test_tasks_of_a_scheduler_take_the_layout_for_as_many_as_there_are():
    book = LayoutBook(Path("b.yaml"), 8, 32, {24: Path("run.yaml"), 16: Path("one_less.yaml")})
    wanted = Launch(("x.py", "--config", "run.yaml"), 24, 24, Path("log"), Path("log"), msrun=True, book=book)
    for tasks, name in ((3, "run.yaml"), (2, "one_less.yaml"), (4, "run.yaml")):
        here = placed(wanted, Placement("Slurm", tasks, 1, 0, "node", 8118))
        refuse_impossible(here)
        assert in_layout(here).command[-1] == name
    with pytest.raises(UserError, match="no layout for 8 devices, 8 on each node; it has those for 16, 24"):
        refuse_impossible(placed(wanted, Placement("Slurm", 1, 0, 0, "node", 8118)))


def test_a_job_that_loses_nodes_goes_on_in_the_layout_for_those_that_are_left(port):
    a_book(for_6="run_6.yaml", for_4="run_4.yaml", for_2="run_2.yaml")
    options = ("--book", "run.book.yaml", "--patience", "0.5", "--restart", "3")
    launchers = [
        begin(UNTIL_ENOUGH_ARE_LOST, port, node, options, workers=6, command="job.py --config run_6.yaml")
        for node in range(3)
    ]
    wait_for_start(launchers, 6, (0, 0), (0, 1), (1, 2), (1, 3), (2, 4), (2, 5))
    launchers[1].send_signal(signal.SIGKILL)
    wait_for_start(launchers[::2], 4, (0, 0), (0, 1), (2, 2), (2, 3))  # node 2 has the ranks of the lost one
    launchers[2].send_signal(signal.SIGKILL)
    first, *_ = finish(launchers, [0, -9, -9])
    assert "not waiting for node 1: the layout for 4 devices is started" in first
    assert "not waiting for node 1, 2: the layout for 2 devices is started" in first
    assert "done run_2.yaml 0 [1.0]" in first


def test_a_node_that_comes_later_is_a_spare(port):
    a_book(for_4="run_4.yaml", for_2="run_2.yaml")
    script = UNTIL_ENOUGH_ARE_LOST.replace("> 2", "> 3 and not os.path.exists('again')")
    options = ("--book", "run.book.yaml", "--patience", "20", "--restart", "1")
    launchers = [
        begin(script, port, node, options, workers=6, command="job.py --config run_4.yaml") for node in range(2)
    ]
    wait_for_start(launchers, 4, (0, 0), (0, 1), (1, 2), (1, 3))
    launchers.append(begin(script, port, 2, options, workers=6, command="job.py --config run_4.yaml"))
    assert not Path("log_2/worker_4.log").exists()
    Path("again").touch()
    launchers[1].send_signal(signal.SIGKILL)
    first, *_ = finish(launchers, [0, -9, 0])
    assert "done run_4.yaml 0 [6.0]" in first
    assert "done run_4.yaml 3 [6.0]" in Path("log_2/worker_3.log").read_text()


def test_patience_without_a_book_is_refused():
    with pytest.raises(UserError, match="--patience requires --book"):
        main(["--patience", "5", "--check", "job.py"])
