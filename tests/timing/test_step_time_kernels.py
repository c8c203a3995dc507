"""A device from a profile's kernels: the file as MindSpore's profiler writes it, made here by a device that is known."""

import pytest

from mindllm.cli.time import main
from mindllm.errors import UserError
from mindllm.timing.costs.operators import operator_seconds
from mindllm.timing.costs.work import ATTENTION, MATRIX, VECTOR, Operator
from mindllm.timing.device import DEFAULT, read_device
from mindllm.timing.measured.calibrate import constants, uncalibrated, with_constants
from mindllm.timing.measured.kernel_file import read_kernels
from mindllm.timing.measured.kernels import errors_left_out

TRUTH = {"matrix": 0.55, "half_size": 220.0, "attention": 0.42, "memory": 0.6, "launch": 8e-6}
DEVICE = with_constants(uncalibrated(read_device(DEFAULT)), TRUTH, "the truth")
HEADER = (
    "Step ID,Name,Type,Accelerator Core,Start Time(us),Duration(us),Wait Time(us),Input Shapes,Input Data Types,"
    "Input Formats,Output Shapes,Output Data Types"
)


def line(kind, core, seconds, inputs, output, dtype="DT_BF16", form="ND"):
    count = len(inputs)
    shapes = [";".join(",".join(map(str, shape)) for shape in each) for each in (inputs, [output])]
    dtypes = ";".join([dtype] * count)
    return f'1,x,{kind},{core},0,{1e6 * seconds:.3f},0,"{shapes[0]}",{dtypes},{";".join([form] * count)},"{shapes[1]}",{dtype}'


def product(rows, inner, columns):
    traffic = 2.0 * (rows * inner + inner * columns + rows * columns)
    sizes = (rows, inner, columns)
    seconds = operator_seconds(Operator("", MATRIX, 2.0 * rows * inner * columns, traffic, sizes), DEVICE)
    return line("MatMulV3", "AI_CORE", seconds, [(inner, rows), (columns, inner)], (rows, columns))  # both transposed


def attention(batch, heads, length, width):
    size = batch * heads * length * width
    one = Operator("", ATTENTION, 2.0 * size * length, 8.0 * size)
    shape = (batch, heads, length, width)
    return line("FlashAttentionScore", "MIX_AIC", operator_seconds(one, DEVICE), [shape] * 3, shape)


def addition(size):
    seconds = operator_seconds(Operator("", VECTOR, bytes=6.0 * size), DEVICE)
    return line("Add", "AI_VECTOR_CORE", seconds, [(size,), (size,)], (size,))


@pytest.fixture
def profile(tmp_path):
    sizes = [
        (1024, 4096, 4096),
        (4096, 4096, 11008),
        (2048, 1024, 512),
        (8192, 5120, 1280),
        (256, 4096, 4096),
        (4096, 512, 4096),
    ]
    lines = [product(*each) for each in sizes for _ in range(3)]
    lines += [attention(1, 32, length, 128) for length in (1024, 2048, 4096)]
    lines += [addition(1 << power) for power in (12, 18, 22, 24, 26)]
    lines.append(line("MatMulV2", "AI_CORE", 1e-3, [(16, 16, 16, 16)] * 2, (256, 256), form="FRACTAL_NZ"))
    lines.append(line("hcom_allReduce_", "HCCL", 1e-3, [(1024,)], (1024,)))
    (tmp_path / "kernel_details.csv").write_text("\n".join([HEADER, *lines]) + "\n", encoding="utf-8")
    return tmp_path


def test_kernels_that_are_alike_are_one_and_others_are_counted(profile):
    kernels, left_out = read_kernels(profile)
    assert sorted(kernel.count for kernel in kernels) == [1] * 8 + [3] * 6
    assert {kernel.operator.sizes for kernel in kernels if kernel.operator.kind == MATRIX} >= {(4096, 4096, 11008)}
    assert left_out == {"MatMulV2: in a format of its own": 1, "hcom_allReduce_ on HCCL": 1}
    assert abs(errors_left_out(uncalibrated(DEVICE), kernels)).mean() < 0.15


def test_the_device_that_ran_them_is_found_again(profile, capsys):
    written = profile / "mine.yaml"
    assert main(["calibrate", "--kernels", str(profile), "--output", str(written)]) == 0
    found = read_device(str(written))
    for name, value in TRUTH.items():
        assert constants(found)[name].of(found) == pytest.approx(value, rel=0.1), name
    assert found.overlap.value == read_device(DEFAULT).overlap.value, "no kernel speaks about it"
    text = capsys.readouterr().out
    assert "not used: 1 MatMulV2: in a format of its own; 1 hcom_allReduce_ on HCCL" in text
    assert "measured: 14 kernels of" in found.efficiency.matrix.source


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "none of its kernels can be used: it has none"),
        ("Step,Compute\n1,2\n", "has no column Type: it is not a kernel_details.csv"),
        ("Type,Accelerator Core,Duration(us)\nAdd,AIV,1\n", "profile with profiler_level: 1"),
        (
            f"{HEADER}\n{addition(64).replace('DT_BF16', 'DT_ODD')}\n",
            "none of its kernels can be used: 1 Add: no shapes or unknown",
        ),
        (
            f"{HEADER}\n{line('Add', 'AIV', 1e-6, [(4,)], (4,)).replace('1.000', 'long')}\n",
            r":2: Duration\(us\) must be a number \(value long\)",
        ),
    ],
)
def test_a_file_that_is_no_such_profile_is_refused(tmp_path, text, said):
    (tmp_path / "kernel_details.csv").write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=said):
        read_kernels(tmp_path)


def test_nothing_to_calibrate_on_is_wrong_input(tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["calibrate", "--output", str(tmp_path / "mine.yaml")])
    assert stopped.value.code == 2
    assert "pass --measured, --kernels or both" in capsys.readouterr().err
