"""What tests share: a quiet MindSpore and a scratch directory for what it leaves in the working directory."""

import os
import subprocess
import sys

import pytest

os.environ.setdefault("GLOG_v", "3")


@pytest.fixture(autouse=True)
def _scratch_working_directory(tmp_path_factory, monkeypatch):
    """MindSpore writes rank_*/ and kernel_meta/ into the working directory."""
    monkeypatch.chdir(tmp_path_factory.mktemp("work"))


@pytest.fixture(scope="session", autouse=True)
def _one_device():
    """Chosen before any kernel runs: afterwards MindSpore refuses a run of the same process that chooses it."""
    import mindspore

    mindspore.set_device("CPU", 0)


@pytest.fixture(autouse=True)
def _graph_mode(_one_device):
    """Cells are compiled as they are in a run: MindSpore's own default executes operator by operator."""
    import mindspore

    mindspore.set_context(mode=mindspore.GRAPH_MODE)


@pytest.fixture(scope="session")
def rerun_with_graph_kernels(tmp_path_factory):
    """Runs the tests of a file that ``-k`` selects in a process that fuses: fusion is chosen once per process."""
    from mindllm.train.device import graph_kernel_environment, missing_for_graph_kernels

    directory = tmp_path_factory.mktemp("kernels")

    def rerun(path, selection):
        if missing := missing_for_graph_kernels():
            pytest.skip(f"graph kernels need {missing}")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", selection, str(path)]
        environment = {**os.environ, **graph_kernel_environment(directory)}
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
        assert result.returncode == 0, result.stdout[-5000:]
        assert list(directory.glob("akg_kernel_meta/*.so")), "nothing was fused"

    return rerun


@pytest.fixture(scope="session")
def graph_cache(tmp_path_factory):
    """Where compiled graphs are kept by content: one directory for the processes of a parallel run of the tests."""
    base = tmp_path_factory.getbasetemp()
    return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "compiled_graphs"
