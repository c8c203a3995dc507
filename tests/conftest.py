"""What tests share: a quiet MindSpore and a scratch directory for what it leaves in the working directory."""

import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("search", deadline=None, max_examples=1000)
settings.load_profile(
    os.environ.get("HYPOTHESIS_PROFILE", "same")
)  # other inputs at every run: HYPOTHESIS_PROFILE=search
os.environ.setdefault("GLOG_v", "3")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts what runs in its background
    signal.signal(signal.SIGINT, signal.default_int_handler)
"""Commands that tests interrupt inherit what is done at a SIGINT: ignored, they would be waited for in vain."""
TESTS = Path(__file__).parent
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(TESTS.parent), os.environ.get("PYTHONPATH", "")]))
"""For commands that tests start elsewhere: toolkit is a part of the checkout, and of no installed package."""
WITHOUT_MINDSPORE = (
    "api/test_errors.py",
    "api/test_import.py",
    "api/test_load_config.py",
    "api/test_results.py",
    "config",
    "compiled/test_cost.py",
    "compiled/test_ir_text.py",
    "compiled/test_somas.py",
    "data/test_chat_template_limits.py",
    "data/test_corpus.py",
    "data/test_documents.py",
    "data/test_gpt_sampling.py",
    "data/test_indexed.py",
    "data/test_instruction.py",
    "data/test_record_preprocess.py",
    "data/test_special_tokens.py",
    "docs/test_errors_page.py",
    "docs/test_pages.py",
    "docs/test_project_files.py",
    "docs/test_site.py",
    "evaluate/test_evaluate_answers.py",
    "evaluate/test_evaluate_code.py",
    "evaluate/test_evaluate_code_filter.py",
    "evaluate/test_evaluate_plan.py",
    "evaluate/test_evaluate_progress.py",
    "evaluate/test_evaluate_task_code.py",
    "generate/test_generate_prompts.py",
    "generate/test_generate_stop_strings.py",
    "generate/test_generate_text_stream.py",
    "launch/clusters/test_kubernetes.py",
    "launch/test_launch_meeting.py",
    "launch/clusters/test_slurm.py",
    "models/test_weight_names.py",
    "quantize/test_integers.py",
    "quantize/test_quantized_formats.py",
    "quantize/test_rounding.py",
    "test_allocation.py",
    "test_console.py",
    "test_end_in_time.py",
    "test_extras.py",
    "test_outside.py",
    "test_outside_fuzz.py",
    "test_signals.py",
    "test_tables.py",
    "timing",
    "toolkit/test_what_is_proved.py",
    "train/test_loss_curve.py",
    "train/test_metrics_file.py",
    "train/test_schedule.py",
    "train/test_step_times.py",
)
"""Rooms and files whose tests are done in a minute together: MindSpore compiles and computes nothing in them."""

AGAIN = tuple(line for line in (TESTS / "shown_again.txt").read_text().splitlines() if not line.startswith("#"))
"""Long cases of what other tests show as well: slow tests, with the marks that stand beside others."""
WRITTEN = "families/test_families.py::test_greedy_text_with_a_cache_is_theirs"
WRITTEN_BY = ("llama", "gemma2", "glm4", "bloom", "deepseek_v2", "mixtral")
"""Families whose text is compared in every run of the tests; their caches differ. That of the others is slow."""


@pytest.fixture(scope="module", autouse=True)
def _young_garbage_alone():
    """Garbage is looked for among what a file of tests makes, not among all that its process has imported and compiled so far.

    Compiling makes so many objects that looking through all of them, again and again, was an eighth of the tests.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Nothing that is imported is garbage: it is not looked for among it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(config, items):
    """Marks all other tests ``compiles``: a new file is one of them until it is named above. Marks what is shown again slow."""
    quick = tuple(f"{TESTS / name}{'' if name.endswith('.py') else os.sep}" for name in WITHOUT_MINDSPORE)
    names = {item.nodeid.removeprefix("tests/"): item for item in items}
    for name, item in names.items():
        if name in AGAIN or (name.startswith(WRITTEN) and name.partition("[")[2].rstrip("]") not in WRITTEN_BY):
            item.add_marker(pytest.mark.slow)
        if not str(item.path).startswith(quick):
            item.add_marker(pytest.mark.compiles)
    whole = {name.partition("::")[0] for name in names} if not any("::" in argument for argument in config.args) else ()
    if unknown := [name for name in AGAIN if name.partition("::")[0] in whole and name not in names]:
        raise pytest.UsageError(f"shown_again.txt names tests that are not there: {', '.join(unknown)}")


@pytest.fixture
def port():
    """A free port whose successor is free, too, for commands that take the one they are given.

    Both are below those Linux gives to outgoing connections, which keep theirs for a minute after their end.
    """
    from mindllm.launch.start import HOST, free_port, refusal

    while refusal((found := free_port(0)) + 1, HOST):
        pass
    return found


@pytest.fixture(autouse=True)
def _scratch_working_directory(tmp_path_factory, monkeypatch):
    """MindSpore writes rank_*/ and kernel_meta/ into the working directory."""
    monkeypatch.chdir(tmp_path_factory.mktemp("work"))


@pytest.fixture(scope="session")
def _one_device():
    """Chosen before any kernel runs: afterwards MindSpore refuses a run of the same process that chooses it."""
    import mindspore

    mindspore.set_device("CPU", 0)


@pytest.fixture(autouse=True)
def _graph_mode(request):
    """Cells are compiled as they are in a run: MindSpore's own default executes operator by operator."""
    if request.node.get_closest_marker("compiles") is None:
        return
    request.getfixturevalue("_one_device")
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
