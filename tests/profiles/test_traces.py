"""Traces: Kineto's of a real program on this CPU and of a device as its form is described, MindSpore's ``trace_view.json``."""

import json

import pytest

from mindllm.errors import UserError
from mindllm.profiles.compare import compare
from mindllm.profiles.run import read_recording
from mindllm.profiles.trace_records import read_trace, work_of
from mindllm.timing.costs.work import ATTENTION, MATRIX, VECTOR


@pytest.fixture(scope="module")
def kineto(tmp_path_factory):
    """Three steps of a small network with PyTorch, the first one before the recording."""
    torch = pytest.importorskip("torch")
    from torch.profiler import ProfilerActivity, profile, schedule

    net = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 64))
    rows, file = torch.ones(32, 256), tmp_path_factory.mktemp("kineto") / "host_1.pt.trace.json"
    plan = schedule(wait=0, warmup=1, active=3)
    ended = lambda recorded: recorded.export_chrome_trace(str(file))  # noqa: E731
    with profile(
        activities=[ProfilerActivity.CPU], record_shapes=True, schedule=plan, on_trace_ready=ended
    ) as recorder:
        for _ in range(4):
            net(rows).square().mean().backward()
            recorder.step()
    return file


def test_a_trace_of_pytorch_on_this_cpu(kineto):
    records, notes = read_recording(kineto.parent)
    assert notes == [f"{kineto}: its rank is not said; taken for rank 0"]
    (record,) = records
    assert record.steps == 2, "of three that were recorded the first is left out"
    products = [one.ran for one in record.kernels.each if getattr(one.ran, "kind", "") == MATRIX]
    sizes = sorted(tuple(sorted(one.sizes)) for one in products)
    first, second = (32, 256, 512), (32, 64, 512)
    assert sizes == sorted([first] * 2 * 2 + [second] * 3 * 2), "forward, gradients; none of the first operand"
    assert {one.dtype for one in products} == {"float32"}
    parts = record.parts
    assert parts.seconds == pytest.approx(parts.computing + parts.free)
    assert sum(one.seconds for one in record.kernels.each) / record.kernels.steps == pytest.approx(
        parts.computing, rel=0.01
    )
    unknown = {one.ran for one in record.kernels.each if isinstance(one.ran, str)}
    assert "operators that call others or make views: the host's own time" in unknown


def event(name, category, start, spent, stream=7, **arguments):
    row = {"pid": 0, "tid": stream} if category in ("kernel", "gpu_user_annotation") else {"pid": 9, "tid": 9}
    return {"ph": "X", "cat": category, "name": name, **row, "ts": 1e15 + start, "dur": spent, "args": arguments}


def of_a_device():
    """Two steps on a device: a product, an exchange that lies half behind a second kernel, and a gap."""
    events = [event("aten::mm", "cpu_op", 0, 5, **{"External id": 3, "Input Dims": [[64, 32], [32, 16]],
                                                   "Input type": ["c10::BFloat16"] * 2})]  # fmt: skip
    for number in (0, 1):
        at = 1000 * number
        events += [
            event(f"ProfilerStep#{number + 5}", "gpu_user_annotation", at, 1000),
            event("ampere_bf16_gemm", "kernel", at, 400, **{"External id": 3}),
            event("ncclDevKernel_AllReduce_Sum_bf16_RING", "kernel", at + 400, 200, 8, **{"Process Group Name": "2"}),
            event("elementwise_kernel", "kernel", at + 500, 300, **{"External id": 99}),
        ]
    return {"schemaVersion": 1, "distributedInfo": {"backend": "nccl", "rank": 3}, "traceEvents": events}


def test_a_trace_of_a_device_as_its_form_is_described(tmp_path):
    file = tmp_path / "trace.json"
    file.write_text(json.dumps(of_a_device()))
    record = read_trace(file, None)
    assert (record.rank, record.steps) == (3, 1)
    parts = record.parts
    found = [parts.computing, parts.exposed, parts.hidden, parts.free, parts.seconds]
    assert found == pytest.approx([700e-6, 100e-6, 100e-6, 200e-6, 1000e-6])
    product, other = record.kernels.each
    assert product.ran.sizes == (64, 32, 16)
    assert other.ran == "elementwise_kernel: no shapes; profile with record_shapes=True"
    (exchange,) = record.collectives.each
    assert (exchange.op, exchange.group, exchange.seconds) == ("AllReduce", "2", pytest.approx(200e-6))


def test_work_of_operators_of_pytorch():
    half = ["c10::BFloat16"] * 4
    assert work_of("aten::addmm", [(16,), (64, 32), (32, 16)], half).sizes == (64, 32, 16)
    assert work_of("aten::bmm", [(8, 64, 32), (8, 32, 16)], half).flops == 2.0 * 8 * 64 * 32 * 16
    queries = (2, 8, 128, 64)
    forward = work_of("aten::_scaled_dot_product_flash_attention", [queries] * 3, half)
    assert (forward.kind, forward.flops) == (ATTENTION, 4.0 * 2 * 8 * 128 * 64 * 64)
    backward = work_of("aten::_scaled_dot_product_flash_attention_backward", [queries] * 4, half)
    assert backward.flops == 2.5 * forward.flops
    assert work_of("aten::add", [(64, 64), (64, 64), ()], [*half[:2], "Scalar"]).bytes == 3 * 2 * 64 * 64
    assert work_of("aten::add", [(64, 64)], half).kind == VECTOR
    assert work_of("aten::mm", [(64, 32), (31, 16)], half) == "aten::mm: shapes that are no product, or an unknown type"
    assert work_of("aten::mm", [(64, 32)], []) == "aten::mm: shapes that are no product, or an unknown type"
    assert work_of("odd", [], []) == "odd: no shapes of tensors"


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
        ([{"ph": "X", "name": "a", "ts": 1, "dur": 1}, 3, None, "x"], "has neither kernels nor operators"),
        ([{"ph": "X", "cat": "kernel", "name": "a", "ts": 1, "dur": 0}], "its steps take no time"),
    ],
)
def test_what_is_no_trace(tmp_path, tree, said):
    (tmp_path / "trace_view.json").write_text(json.dumps(tree))
    with pytest.raises(UserError, match=f"trace_view.json: .*{said}"):
        read_recording(tmp_path)
