"""MindSpore's ``trace_view.json``: lanes of a device, operators of a CPU, and files that are not traces."""

import json

import pytest

from mindllm.errors import UserError
from mindllm.profiles.compare import compare
from mindllm.profiles.run import read_recording
from mindllm.profiles.trace_records import read_trace


def mindspore_lanes():
    """Two steps as MindSpore 2.10 writes them on a device: times are text."""

    def slice_of(process, name, start, spent):
        return {
            "ph": "X",
            "name": name,
            "pid": process,
            "tid": 1,
            "ts": f"{1e15 + start:.3f}",
            "dur": f"{spent:.3f}",
            "args": {},
        }

    names = {1: "MindSpore", 2: "Overlap Analysis", 3: "HCCL"}
    events = [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}} for pid, name in names.items()
    ]
    for number in (0, 1):
        at = 1e6 * number
        events += [
            slice_of(1, f"ProfilerStep#{number}", at, 1e6),
            slice_of(2, "Computing", at, 5e5),
            slice_of(2, "Communication", at + 4e5, 3e5),
            slice_of(2, "Communication(Not Overlapped)", at + 5e5, 2e5),
            slice_of(2, "Free", at + 7e5, 3e5),
            slice_of(3, "hcom_receive__1_0_1", at + 5e5, 5e4),
        ]
    return events


def test_lanes_of_mindspore_stand_for_its_table_of_steps(step, tmp_path):
    place = tmp_path / "rank_1" / "ASCEND_PROFILER_OUTPUT"
    place.mkdir(parents=True)
    (place / "trace_view.json").write_text(json.dumps(mindspore_lanes()))
    records, notes = read_recording(tmp_path)
    parts = records[0].parts
    found = [parts.computing, parts.exposed, parts.hidden, parts.free, parts.between_stages]
    assert found == pytest.approx([0.5, 0.2, 0.1, 0.3, 0.05])
    assert notes == [
        f"{place / 'trace_view.json'}: kernels have no shapes in a trace; give the directory of kernel_details.csv"
    ]
    assert {one.cause for one in compare(step, records).findings} >= {"not in kernels", "host"}


def test_operators_of_mindspore_on_a_cpu_have_no_shapes(tmp_path):
    names = ("Default/0-Dense/MatMul-op0", "Default/1-ReLU/ReLU-op0")
    events = [{"ph": "M", "name": "process_name", "pid": 2, "tid": 0, "args": {"name": "CPU OP"}}]
    events += [
        {
            "ph": "X",
            "name": name,
            "pid": 2,
            "tid": 0,
            "ts": f"179563737694{start}.970",
            "dur": "100.5",
            "cat": "",
            "args": {},
        }
        for start, name in zip((1000, 1200), names, strict=True)
    ]
    (tmp_path / "trace_view.json").write_text(json.dumps(events))
    record = read_trace(tmp_path / "trace_view.json", None, 2)
    assert record.parts.computing == pytest.approx(2 * 100.5e-6 / 2)
    assert [one.ran for one in record.kernels.each] == [
        "MatMul: no shapes in a trace of MindSpore",
        "ReLU: no shapes in a trace of MindSpore",
    ]
    assert record.notes == (f"{tmp_path / 'trace_view.json'}: marks no steps; taken to hold 2",)


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({}, "has no traceEvents"),
        ([], "has no slice with a beginning and an end"),
        ([{"ph": "X", "name": "a", "ts": "1e400", "dur": 1}], "a: ts must be microseconds from 0 on"),
        ([{"ph": "X", "name": "a", "ts": 1, "dur": -1}], "a: dur must be microseconds"),
        ([{"ph": "X", "name": "a", "ts": 1, "dur": 1}, 3, None, "x"], "no operators in its steps"),
        ([{"ph": "X", "cat": "kernel", "name": "a", "ts": 1, "dur": 0}], "its steps take no time"),
    ],
)
def test_what_is_no_trace(tmp_path, tree, said):
    (tmp_path / "trace_view.json").write_text(json.dumps(tree))
    with pytest.raises(UserError, match=f"trace_view.json: .*{said}"):
        read_recording(tmp_path)
