"""What the table of published YAMLs calls fitting, and what both programs are given."""

from __future__ import annotations

from mindllm.units import GIB
from toolkit.benchmark.published_fit import Fit, summary_rows
from toolkit.benchmark.published_programs import recomputes_first, reduce_run


def fit(formula, used=None, actual=None, speed=None, copies=1):
    sizes = {"used": None if used is None else used * GIB, "actual": None if actual is None else actual * GIB}
    return Fit("digest", "run.yaml", copies, "float32", speed, 0, 1, 58 * GIB, formula * GIB, **sizes)


def test_the_used_peak_is_compared_with_the_whole_limit():
    assert fit(57).fits
    assert not fit(59).fits
    assert fit(59, used=57, actual=66).fits  # a device has no fragments, and the dry run has the last word
    assert not fit(57, used=59, actual=60).fits


def test_the_summary_counts_files_and_what_the_formula_alone_rejects():
    rows = dict(summary_rows([fit(50, copies=3), fit(57, copies=2), fit(60, speed=400.0, copies=4)]))
    assert rows["YAMLs, distinct runs"] == "9, 3"
    assert rows["YAMLs that do not fit, distinct runs"] == "4, 1"
    assert rows["of these with a published speed"] == "1"
    assert rows["by formula with 5% reserved"] == "6, 2"


def test_a_reduced_run_has_a_layer_for_each_stage_and_keeps_its_widths():
    model = {"type": "LlamaConfig", "num_layers": 28, "hidden_size": 3584, "offset": [1, -1], "seq_length": 8192}
    tree = {
        "model": {"model_config": model},
        "parallel_config": {"pipeline_stage": 2, "data_parallel": 4, "micro_batch_num": 16},
        "recompute_config": {"recompute": [[7, 0], [0, 0]], "select_recompute": {"feed_forward.mul": [14, 14]}},
        "optimizer": {"type": "FP32StateAdamWeightDecay"},
        "runner_config": {"batch_size": 2},
    }
    run = reduce_run(tree, "random.mindrecord")
    reduced = run["model"]["model_config"]
    assert (reduced["num_layers"], reduced["offset"], reduced["hidden_size"]) == (2, 0, 3584)
    assert run["parallel_config"] == {"pipeline_stage": 2, "data_parallel": 4, "micro_batch_num": 2}
    assert run["recompute_config"] == {"recompute": True}
    assert run["train_dataset"]["batch_size"] == run["runner_config"]["batch_size"] == 2
    assert tree["model"]["model_config"]["num_layers"] == 28
    assert not recomputes_first({"recompute": [[0, 7]]})
