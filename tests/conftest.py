"""What tests share: a quiet MindSpore and a scratch directory for what it leaves in the working directory."""

import os
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
TESTS = Path(__file__).parent
WITHOUT_MINDSPORE = (
    "config",
    "compiled/test_cost.py",
    "compiled/test_ir_text.py",
    "data/test_chat_template_limits.py",
    "data/test_corpus.py",
    "data/test_documents.py",
    "data/test_gpt_sampling.py",
    "data/test_indexed.py",
    "data/test_instruction.py",
    "data/test_record_preprocess.py",
    "data/test_special_tokens.py",
    "evaluate/test_evaluate_answers.py",
    "evaluate/test_evaluate_code.py",
    "evaluate/test_evaluate_plan.py",
    "evaluate/test_evaluate_progress.py",
    "generate/test_generate_prompts.py",
    "generate/test_generate_stop_strings.py",
    "generate/test_generate_text_stream.py",
    "launch/test_launch_meeting.py",
    "models/test_weight_names.py",
    "quantise/test_quantised_formats.py",
    "quantise/test_rounding.py",
    "test_console.py",
    "test_extras.py",
    "test_tables.py",
    "timing",
    "toolkit/test_loss_curve.py",
    "toolkit/test_pipeline_closed_forms.py",
    "toolkit/test_pipeline_zero_bubble.py",
    "toolkit/test_step_time_tool.py",
    "train/test_metrics_file.py",
    "train/test_schedule.py",
    "train/test_step_times.py",
)
"""Rooms and files whose tests are done in a minute together: MindSpore compiles and computes nothing in them."""


AGAIN = (
    "compiled/test_asked_for.py::test_a_graph_is_what_its_own_yaml_asks_for[interleaved all]",
    "compiled/test_asked_for.py::test_a_graph_is_what_its_own_yaml_asks_for[dp2 accumulating]",
    "compiled/test_asked_for.py::test_so_it_is_in_other_forms[tied tp2]",
    "compiled/test_asked_for.py::test_optimizer_parallel_that_was_dropped",
    "compiled/test_compiled_collectives.py::test_replicas_that_share_optimizer_state_count_their_copies",
    "compiled/test_compiled_pipeline.py::test_a_tied_embedding_is_sent_and_its_gradient_returned",
    "compiled/test_liveness.py::test_compiled_graphs_run_every_call_and_keep_to_bounds",
    "compiled/test_simulate_rank.py::test_layers_of_other_stages_change_nothing",
    "compiled/test_stand_in.py::test_several_at_once_make_it_once",
    "end_to_end/test_evaluation_on_tasks.py::test_processes_share_the_requests",
    "end_to_end/test_several_processes.py::test_two_processes_go_on_where_one_has_stopped_until_one_of_them_is_killed",
    "end_to_end/test_simulated_runs.py::test_what_it_saved_is_no_start_of_a_real_run",
    "generate/test_generate_beams.py::test_batches_and_the_graph_path_find_the_same",
    "generate/test_generate_generator.py::test_a_stop_string_ends_the_text_within_tokens[keys1]",
    "generate/test_generate_generator.py::test_half_precision_gives_the_logits_of_the_full_forward[float16]",
    "generate/test_generate_native.py::test_logits_equal_those_of_the_cells[multi-head-None]",
    "generate/test_generate_predict.py::test_the_lines_of_a_file_are_prompts",
    "models/test_chunked_loss.py::test_chunks_change_neither_loss_nor_gradients[fields0-1e-06-True]",
    "models/test_chunked_loss.py::test_chunks_change_neither_loss_nor_gradients[fields2-0.005-True]",
    "toolkit/test_cluster_check_faults.py::test_healthy_clusters_pass_and_nothing_is_suspected[tied]",
    "toolkit/test_ir_inspect.py::test_a_pipeline_sends_each_micro_batch_and_gathers_weights_once",
    "toolkit/test_ir_inspect_recompute.py::test_what_is_saved_is_what_the_same_run_keeps_without_recomputation",
    "toolkit/test_weights_tool.py::test_memory_of_converting_is_that_of_a_few_tensors",
    "train/test_compile_cache.py::test_it_can_be_switched_off",
    "train/test_engine.py::test_a_run_on_packs_learns_what_its_rows_alone_would_teach",
    "train/test_engine.py::test_lower_precision_follows_fp32_closely_but_is_not_fp32[float16]",
    "train/test_engine.py::test_whether_a_step_overflows_does_not_depend_on_how_its_batch_is_cut",
    "train/test_optimizer.py::test_equals_pytorch_with_graph_kernels",
    "tune/test_resuming.py::test_a_run_goes_on_from_a_snapshot_bit_for_bit[galore]",
    "tune/test_resuming.py::test_a_run_goes_on_from_a_snapshot_bit_for_bit[lisa]",
)
"""Long cases of what other tests show as well: slow tests, with the marks that stand beside others."""
WRITTEN = "families/test_families.py::test_greedy_text_with_a_cache_is_theirs"
WRITTEN_BY = ("llama", "gemma2", "glm4", "bloom", "deepseek_v2", "mixtral")
"""Families whose text is compared in every run of the tests; their caches differ. That of the others is slow."""


def pytest_collection_modifyitems(items):
    """Marks all other tests ``compiles``: a new file is one of them until it is named above. Marks what is shown again slow."""
    quick = [TESTS / name for name in WITHOUT_MINDSPORE]
    for item in items:
        name = item.nodeid.removeprefix("tests/")
        if name in AGAIN or (name.startswith(WRITTEN) and name.partition("[")[2].rstrip("]") not in WRITTEN_BY):
            item.add_marker(pytest.mark.slow)
        if not any(item.path.is_relative_to(path) for path in quick):
            item.add_marker(pytest.mark.compiles)


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
