"""Recordings of others: which ranks they are of, what is missing, and what is wrong with a file of them."""

import json
import os
import re
import shutil

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from profile_maker import Maker, Plants

from mindllm.errors import UserError
from mindllm.profiles.ascend_files import kind_of
from mindllm.profiles.compare import compare
from mindllm.profiles.kernel_terms import scope_of
from mindllm.profiles.report import ProfileReport
from mindllm.profiles.run import read_recording

FILES = ("step_trace_time.csv", "kernel_details.csv", "communication.json", "communication_matrix.json")


@pytest.fixture(scope="module")
def made(step, tmp_path_factory):
    """The recording of rank 0."""
    return Maker(step, Plants(host=0.3)).write(tmp_path_factory.mktemp("made"), {0})


@pytest.fixture
def rank(made, tmp_path):
    """A copy of its files, which may be changed."""
    files = next(made.rglob("step_trace_time.csv")).parent
    shutil.copytree(files, tmp_path / "rank_0")
    return tmp_path / "rank_0"


def causes(step, directory):
    records, notes = read_recording(directory)
    comparison = compare(step, records)
    return {one.cause for one in comparison.findings if not one.consequence}, notes, comparison


def test_without_kernels_the_step_is_told_by_its_parts(step, rank):
    (rank / "kernel_details.csv").unlink()
    found, notes, comparison = causes(step, rank)
    assert found == {"host"}
    assert notes == [f"{rank / 'kernel_details.csv'}: not there"]
    assert comparison.unexplained > 0.1 * step.seconds, "of the other stage, which was not recorded"


def test_without_exchanges_one_by_one_they_are_told_together(step, made, tmp_path):
    slow = Maker(step, Plants(exchanges={("AllReduce", "tp"): 3.0})).write(tmp_path, {0})
    file = next(slow.rglob("communication.json"))
    file.unlink()
    found, notes, comparison = causes(step, slow)
    assert found == {"exposed"}
    assert notes == [f"{file}: not there"]
    assert comparison.findings[0].what == "exchanges, one by one not recorded"


def test_exchanges_among_the_kernels_stand_for_a_file_of_them(step, rank):
    tree = json.loads((rank / "communication.json").read_text())
    lines = []
    for number, told in tree.items():
        for kinds in told.values():
            for name, one in kinds.items():
                if not name.startswith("Total"):
                    kind = f"{name.partition('__')[0]}_"
                    elapsed = 1e3 * one["Communication Time Info"]["Elapse Time(ms)"]
                    lines.append(f"{number.removeprefix('step')},{name},{kind},HCCL,0,{elapsed},0,,,,,,")
    with open(rank / "kernel_details.csv", "a") as file:
        file.write("\n".join([*lines, ""]))
    (rank / "communication.json").unlink()
    assert causes(step, rank)[0] == {"host"}


def test_kernels_without_shapes_are_said_and_never_taken_for_nothing(step, rank):
    header, *lines = (rank / "kernel_details.csv").read_text().splitlines()
    columns = [number for number, name in enumerate(header.split(",")) if not name.startswith(("Input", "Output"))]
    short = [",".join(header.split(",")[number] for number in columns)]
    short += [",".join([*line.split(",")[:7]]) for line in lines]
    (rank / "kernel_details.csv").write_text("\n".join(short) + "\n")
    found, _, comparison = causes(step, rank)
    assert found == {"host", "unknown", "work"}
    whole = {
        cause: sum(one.seconds for one in comparison.findings if one.cause == cause) for cause in ("unknown", "work")
    }
    assert whole["unknown"] == pytest.approx(-whole["work"], rel=0.1), "all that is predicted is missing"
    assert any("profile with profiler_level: 1" in one.what for one in comparison.findings)


def test_steps_that_are_not_told_apart(step, rank):
    lines = (rank / "step_trace_time.csv").read_text().splitlines()
    cells = [float(cell) for cell in lines[2].split(",")]
    (rank / "step_trace_time.csv").write_text(f"{lines[0]}\n0,{','.join(str(4 * cell) for cell in cells[1:])}\n")
    for name in FILES[1:]:
        (rank / name).unlink()
    records, _ = read_recording(rank, 4)
    assert records[0].parts.seconds == pytest.approx(step.seconds + 0.375, rel=0.01)


def test_ranks_are_told_by_the_file_beside_or_by_the_directory(step, made, rank, tmp_path):
    assert [record.rank for record in read_recording(made)[0]] == [0]
    shutil.copytree(rank, tmp_path / "rank_5" / "ASCEND_PROFILER_OUTPUT")
    shutil.copytree(rank, tmp_path / "rank_3" / "first")
    shutil.copytree(rank, tmp_path / "rank_3" / "second")
    os.utime(tmp_path / "rank_3" / "first" / "step_trace_time.csv", (2e9, 2e9))
    records, notes = read_recording(tmp_path)
    assert [record.rank for record in records] == [0, 3, 5]
    assert notes == [f"rank 3: 2 recordings; the latest is read, {tmp_path / 'rank_3' / 'first'}"]
    (tmp_path / "other").mkdir()
    shutil.copytree(rank, tmp_path / "other" / "files")
    assert "its rank is not said; taken for rank 0" in read_recording(tmp_path / "other")[1][0]
    (tmp_path / "rank_5").rename(tmp_path / "rank_8")
    beyond, _ = read_recording(tmp_path / "rank_8")
    with pytest.raises(UserError, match="is of rank 8, and the run has 8 devices"):
        compare(step, beyond)


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("step_trace_time.csv", "Step,Computing\n1,2\n", "has no column Com"),
        ("step_trace_time.csv", "", "has no step; profile one whole step"),
        ("step_trace_time.csv", "Step,Computing,Communication(Not Overlapped),Free\n1,0,0,0\n", "its steps take no time"),
        ("step_trace_time.csv", "Step,Computing,Communication(Not Overlapped),Free\n1,inf,0,0\n", r":2: Computing must be"),
        ("step_trace_time.csv", 'Step,Computing,Communication(Not Overlapped),Free\n1,"2,0,0\n', "line 1: unexpected end"),
        ("kernel_details.csv", "Type,Accelerator Core,Duration(us)\nAdd,AIV,-3\n", r":2: Duration\(us\) must be microseconds"),
        ("communication.json", "[" * 9000 + "]" * 9000, "not JSON: nested too deeply"),
        ("communication.json", "[]", "not an object: it is not a communication.json"),
        ("communication.json", '{"step": {"p2p": {"a": {"Communication Time Info": {"Wait Time(ms)": 1e400}}}}}', r"a: Wait Ti"),
    ],
)  # fmt: skip
def test_files_of_another_form(rank, file, text, said):
    (rank / file).write_text(text)
    with pytest.raises(UserError, match=re.escape(str(rank / file)) + ".*" + said):
        read_recording(rank)


@pytest.mark.parametrize("file", FILES)
def test_what_is_no_file_is_refused(rank, file):
    (rank / file).unlink()
    os.mkfifo(rank / file)
    with pytest.raises(UserError, match=f"{file}: is a FIFO, not a file"):
        read_recording(rank)


def test_nothing_of_a_profiler(tmp_path):
    with pytest.raises(UserError, match=r"has no step_trace_time\.csv and no trace_view\.json, here or below"):
        read_recording(tmp_path)
    with pytest.raises(UserError, match="neither a directory nor a trace"):
        read_recording(tmp_path / "nowhere")


ODD = ["inf", "nan", "-1", "1e400", "1e14", "0", "", '"', "9" * 5000, "x", "\u0663", "1_0", " 5\t"]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_a_cell_holds_it_is_read_or_refused(step, tmp_path_factory, data):
    place = tmp_path_factory.mktemp("odd")
    steps = {
        "Step": "1",
        "Computing": "5e5",
        "Communication(Not Overlapped)": "1e5",
        "Free": "1e5",
        "Bubble": "1",
        "Preparing": "1",
    }
    kernel = {
        "Step ID": "1", "Name": "a", "Type": "MatMulV3", "Accelerator Core": "AI_CORE", "Duration(us)": "9",
        "Input Shapes": "64,32;32,16",
        "Input Data Types": "DT_BF16;DT_BF16", "Input Formats": "ND;ND", "Output Shapes": "64,16", "Output Data Types": "DT_BF16",
    }  # fmt: skip
    for row in (steps, kernel):
        if data.draw(st.booleans()):
            row[data.draw(st.sampled_from(list(row)))] = data.draw(st.sampled_from(ODD))
    for name, row in (("step_trace_time.csv", steps), ("kernel_details.csv", kernel)):
        cells = [cell if '"' in cell else f'"{cell}"' for cell in row.values()]
        (place / name).write_text(",".join(row) + "\n" + ",".join(cells) + "\n")
    exchange = {
        "Communication Time Info": {"Elapse Time(ms)": 1.0, "Wait Time(ms)": 0.5},
        "Communication Bandwidth Info": {},
    }
    odd = st.sampled_from([None, -1, 1e308, float("inf"), "x", [], {}, True, 10**30, 1])
    name = data.draw(
        st.sampled_from(["hcom_allReduce__1@g", "hcom_receive_1", "Total", "odd", "", "AllGather-op3@g@h"])
    )
    if data.draw(st.booleans()):
        exchange["Communication Time Info"]["Elapse Time(ms)"] = data.draw(odd)
    else:
        exchange["Communication Bandwidth Info"] = data.draw(odd)
    (place / "communication.json").write_text(json.dumps({"step1": {"collective": {name: exchange}}}))
    links = data.draw(odd | st.just({"0-1": {"Bandwidth(GB/s)": data.draw(odd)}}))
    (place / "communication_matrix.json").write_text(
        json.dumps({"step1": {"collective": {"allreduce-total@g": links}}})
    )
    said = read_or_refused(step, place)
    assert len(said) < 20_000


def read_or_refused(step, place):
    """What is printed, or why it is not; a mistake of the user names the file."""
    try:
        records, notes = read_recording(place)
    except UserError as error:
        return str(error) if str(place) in str(error) else str(error) * 20_000
    report = ProfileReport(compare(step, records), tuple(notes))
    return str(report) + json.dumps(report.to_dict(), allow_nan=False)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_a_trace_holds_it_is_read_or_refused(step, tmp_path_factory, data):
    odd = st.sampled_from(
        [None, -1, 0, 1, 1e308, float("nan"), "7", "x", [], {}, True, 10**30, [[64, 32], [32, 16]], [[-1], "a"]]
    )
    event = {
        "ph": "X",
        "cat": "",
        "name": "Default/Dense/MatMul-op0",
        "pid": 2,
        "tid": 1,
        "ts": 1,
        "dur": 90,
        "args": {},
    }
    process = {"ph": "M", "name": "process_name", "pid": 2, "tid": 0, "args": {"name": "CPU OP"}}
    lane = {**process, "pid": 3, "args": {"name": "Overlap Analysis"}}
    events = [
        process,
        event,
        {**event, "name": "ProfilerStep#1"},
        *data.draw(st.sampled_from([[], [lane, {**event, "pid": 3, "name": "Computing"}]])),
    ]
    for one in events:
        inside = one if data.draw(st.booleans()) or not one["args"] else one["args"]
        inside[data.draw(st.sampled_from(list(inside)))] = data.draw(odd)
    place = tmp_path_factory.mktemp("odd")
    tree = data.draw(st.just({"traceEvents": events}) | st.just(events) | odd)
    (place / "trace_view.json").write_text(json.dumps(tree))
    assert len(read_or_refused(step, place)) < 20_000


def test_names_tell_kinds_and_layers():
    names = {
        "hcom_allReduce__674_0_1@1234": "AllReduce",
        "hcom_reduceScatter__1_0_1": "ReduceScatter",
        "Default/x/AllGather-op3@g": "AllGather",
        "hcom_alltoallvc__9": "AlltoAll",
        "hcom_receive__7_0_1": "Receive",
        "Default/Send-op1@g": "Send",
        "odd": "",
    }
    assert {name: kind_of(name) for name in names} == names
    full = "Gradients/Default/network-CausalLM/model-Decoder/layers-CellList/12-DecoderLayer/feed_forward-F/w2-Linear/"
    assert scope_of(f"{full}MatMul-op5/MatMulV3_abc") == (12, "feed_forward.w2")
    assert scope_of("Default/model.layers.3.attention/Add-op1") == (3, "attention")
    assert scope_of("Default/lm_head-Linear/MatMul-op1") == (None, "")
