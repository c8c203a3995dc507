"""What the compiler refuses comes back with the operator, its strategy, its line and the reason; nothing is left behind."""

import os
import re
import tempfile

import pytest
from markdown_pages import ROOT
from page_commands import missing, steps
from small_cluster import cluster_run

from mindllm.compiled.rank import compile_rank as subject
from mindllm.compiled.rank.compile_rank import compile_rank
from mindllm.parallel.refusals import CompileFailed, frames, reason

FAULT = """
import os, resource, signal
from fnmatch import fnmatchcase
def break_sharding(changes):
    import mindllm.parallel.build as build
    from mindllm.parallel.sharding import on
    table = build.sharding_table
    def broken(*model):
        good = table(*model)
        return good | {{path: bad for pattern, bad in changes(on).items() for path in good if fnmatchcase(path, pattern)}}
    build.sharding_table = broken
{fault}
"""
BAD_SHARDINGS = {
    "feed_forward.w1.matmul": (
        "{'model.layers.*.feed_forward.w[13].matmul': on(('dp', 'tp'), ('tp', None))}",
        r"strategy: inputs \(\(2, 2\), \(2, 1\)\)",
        r"models/linear\.py:\d+, called from mindllm/models/feed_forward\.py:\d+",
        r"shard num of first input's column is 2, but the shard num of second input's column is 1",
    ),
    "attention.attention.flash_attention": (
        "{'model.layers.*.attention.attention.flash_attention': "
        "on(('dp', 'tp', None, None), ('dp', None, None, None), ('dp', 'tp', None, None), (None, None))}",
        r"strategy: inputs \(\(2, 2, 1, 1\), \(2, 1, 1, 1\)",
        r"mindllm/models/attention/attention\.py:\d+, called from",
        r"split num of N1-dim and N2-dim must be equal",
    ),
    "attention.rotary.concat": (
        "{'model.layers.*.attention.rotary.concat': on(('dp', None, None, 'tp'), ('dp', None, None, 'tp'))}",
        r"strategy: inputs \(\(2, 1, 1, 2\)",
        r"models/rotary\.py:\d+, called from",
        r"\w",
    ),
}

SHOWN = next(step.shown for step in steps(ROOT / "docs/compiled_graph.md") if step.shown)


@pytest.fixture
def worker_fault(tmp_path, monkeypatch):
    """Makes the worker execute lines before it begins, and gives temporary files a directory of their own."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    claims = tmp_path / "runtime"
    claims.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(claims))

    def inject(lines):
        (tmp_path / "sitecustomize.py").write_text(FAULT.format(fault=lines))
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))

    yield inject
    assert list(temporary.iterdir()) == []
    assert [path.name for path in claims.rglob("*") if path.is_file()] == ["lock"]


@pytest.mark.parametrize("operator", BAD_SHARDINGS)
def test_a_sharding_the_compiler_refuses(operator, worker_fault):
    changes, *expected = BAD_SHARDINGS[operator]
    worker_fault(f"break_sharding(lambda on: {changes})")
    with pytest.raises(CompileFailed) as error:
        compile_rank(cluster_run(dp=2, tp=2), 0)
    text = str(error.value)
    assert error.value.exit_code == 2
    assert f"compiling rank 0: MindSpore's compiler refuses the sharding of model.layers.0.{operator} (" in text
    for pattern in (*expected, r"to change: sizes in parallel_config"):
        assert re.search(pattern, text), text
    assert "Traceback" not in text
    assert "Function Call Stack" not in text
    if f"the sharding of model.layers.0.{operator} (" in SHOWN[0]:
        assert missing(SHOWN, f"error: {text}") == [], text


def test_a_layout_the_mesh_cannot_hold(worker_fault):
    worker_fault("break_sharding(lambda on: {'model.layers.*.feed_forward.mul': on(('dp', 'tp'), ('tp', 'dp'))})")
    with pytest.raises(CompileFailed, match=r"sharding of 'model\.layers\.0\.feed_forward\.mul': axes of") as error:
        compile_rank(cluster_run(dp=2, tp=2), 0)
    assert "Traceback" not in str(error.value)


@pytest.mark.parametrize(
    ("fault", "how"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "the system ended it"),
        ("resource.setrlimit(resource.RLIMIT_AS, (1 << 28, 1 << 28)); bytearray(1 << 30)", "an allocation failed"),
    ],
)
def test_too_little_memory(fault, how, worker_fault):
    worker_fault(fault)
    with pytest.raises(CompileFailed, match=rf"compiling rank 1: too little memory \({how}; .* were free") as error:
        compile_rank(cluster_run(dp=2), 1)
    assert "run fewer ranks at a time" in str(error.value)


@pytest.mark.parametrize("log", ["terminate called after throwing an instance of 'std::bad_alloc'", "MemoryError"])
def test_the_compiler_itself_runs_out_of_memory(log):
    assert "too little memory (an allocation failed" in str(subject.failure(-6, log, "compiling rank 0", "1 GiB"))


def test_an_unknown_error_is_shown_without_its_stacks():
    log = """Traceback (most recent call last):
  File "x.py", line 1, in <module>
RuntimeError: Something else

----------------------------------------------------
"""
    text = str(subject.failure(1, log, "compiling rank 0", "1 GiB"))
    assert "compiling rank 0 failed (exit code 1):\nRuntimeError: Something else" in text
    assert "Traceback" not in text


def test_frames_and_reasons_are_read_from_what_the_compiler_says():
    message = """Failure:operator Mul init failed
In file /p/mindllm/models/feed_forward.py:27, 23~31/        return self.w2(self.mul(self.w1(x), self.w3(x)))/
In file /p/mindllm/models/feed_forward.py:26~27, 4~56/    def construct(self, x: Tensor) -> Tensor:/
In file /v/site-packages/mindspore/ops/composite/base.py:615, 37~39/    return grad_(fn, weights)(*args)/
"""
    assert [(frame.line, frame.attribute) for frame in frames(message)] == [(27, "mul")]
    log = (
        "[ERROR] PARALLEL(1,7f,python):2026-11-21-15:19:25.004.951 [mindspore/a/b.cc:21] Check] MulInfo56: it differs\n"
    )
    assert reason(log) == "it differs"
    assert reason("nothing") == ""
