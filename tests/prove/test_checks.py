"""Spoilt runs, each refuted at the right question with the advice that mends it; what needs no compiler."""

from __future__ import annotations

import numpy as np
import pytest
from small_cluster import cluster_run

from mindllm.config import load_config, override_config
from mindllm.data.indexed import IndexedWriter
from mindllm.errors import CheckFailed, UserError
from mindllm.prove.answers import Standing, located
from mindllm.prove.checks import checkpoints, data, start, step_time
from mindllm.prove.pieces import Options
from mindllm.prove.prove import refused
from mindllm.prove.words import _of_step as of_step
from mindllm.terminal.progress import unwatched

SEVENTY = "configs/llama2/pretrain_llama2_70b_64p.yaml"
PATH = "train_dataset.data_loader.config.data_path"


def answered(check, config, **options):
    """Return the only answer of a check."""
    (answer,) = check.answers(config, Options(**options), unwatched)
    return answer


def corpus(directory, documents, name="corpus"):
    """Write documents of so many tokens; token ids count from 0."""
    prefix = directory / name
    with IndexedWriter(prefix, np.uint16) as writer:
        for length in documents:
            writer.append(np.arange(length) % 100)
            writer.end_document()
    return str(prefix)


def trained_on(path, **changes):
    return override_config(cluster_run(dp=2), {PATH: path, "train_dataset.data_loader.config.split": "1", **changes})


def test_a_corpus_that_is_enough_is_proved(tmp_path):
    answer = answered(data, trained_on(corpus(tmp_path, [400, 400]), **{"runner_config.train_steps": 2}))
    assert answer.standing is Standing.PROVED
    assert answer.figures["passes"] <= 1
    assert answer.figures["samples_per_pass"] >= 20


def test_text_that_is_read_too_often_is_refuted(tmp_path):
    answer = answered(data, trained_on(corpus(tmp_path, [400, 400]), **{"runner_config.train_steps": 1000}))
    assert answer.standing is Standing.REFUTED
    (finding,) = answer.findings
    assert finding.key == "runner_config.train_steps"
    steps = int(finding.advice.split()[1])
    again = answered(data, trained_on(corpus(tmp_path, [400, 400], "b"), **{"runner_config.train_steps": steps}))
    assert again.standing is Standing.PROVED


def test_a_corpus_smaller_than_a_batch_is_refuted(tmp_path):
    answer = answered(data, trained_on(corpus(tmp_path, [40])))
    assert answer.standing is Standing.REFUTED
    assert answer.findings[0].key == PATH
    assert "global batch" in answer.findings[0].message


def test_a_file_that_ends_early_is_refuted(tmp_path):
    path = corpus(tmp_path, [400, 400])
    with open(f"{path}.bin", "r+b") as file:
        file.truncate(100)
    answer = answered(data, trained_on(path))
    assert answer.standing is Standing.REFUTED
    assert path in answer.findings[0].message


def test_one_missing_file_of_two_is_refuted(tmp_path):
    paths = [corpus(tmp_path, [400]), str(tmp_path / "other")]
    answer = answered(data, trained_on(paths))
    assert answer.standing is Standing.REFUTED
    assert "other is not there" in answer.findings[0].message


def test_files_that_are_elsewhere_are_not_proved(tmp_path):
    answer = answered(data, trained_on(str(tmp_path / "nowhere")))
    assert answer.standing is Standing.NOT_PROVED
    assert answer.findings[0].key == PATH


def test_a_vocabulary_that_does_not_fit_is_refuted(tmp_path):
    path = corpus(tmp_path, [400, 400])
    answer = answered(data, trained_on(path, **{"model.model_config.vocab_size": 96}))
    assert answer.standing is Standing.REFUTED
    assert answer.findings[0].key == "model.model_config.vocab_size"
    assert "vocab_size is 96" in answer.findings[0].message


def test_uneven_stages_are_refuted_with_the_plan():
    config = load_config(SEVENTY)
    even = answered(step_time, config)
    assert even.standing is Standing.PROVED
    assert even.figures["lower_bound"] <= even.figures["objective"]
    assert even.figures["as_planned"] == even.figures["seconds"]
    gain = even.figures["seconds"] / even.figures["best_plan"] - 1
    assert even.says.endswith(f", {gain:.1%} above the best plan")
    glance = next(one for one in of_step(even) if one.name == "From the best")
    assert (glance.value, glance.about) == (
        f"{gain:+.1%}",
        f"over {even.figures['best_plan']:.4g} s, the best plan of this strategy",
    )
    uneven = override_config(config, {"model.model_config.offset": [8, -4, 0, 0, 0, 0, 0, -4]})
    answer = answered(step_time, uneven)
    assert answer.standing is Standing.REFUTED
    (finding,) = answer.findings
    assert finding.key == "model.model_config.offset"
    assert "faster" in finding.message
    assert "offset [" in finding.advice
    assert answer.figures["seconds"] > even.figures["seconds"]


def test_more_recomputation_than_memory_asks_for_is_told_and_refutes_nothing():
    answer = answered(step_time, load_config("configs/mixtral/pretrain_mixtral_8x7b.yaml"))
    assert answer.standing is Standing.PROVED
    assert "above the best plan" in answer.says
    (finding,) = answer.findings
    assert "select_recompute [" in finding.advice


def test_a_search_that_finds_nothing_is_said(monkeypatch):
    def nothing(*_):
        raise CheckFailed("nothing fits")

    monkeypatch.setattr("mindllm.strategies.outcome.find_strategies", nothing)
    answer = answered(step_time, load_config(SEVENTY), search=True)
    assert answer.standing is Standing.NOT_PROVED
    assert [finding.message for finding in answer.findings] == ["no search: nothing fits"]


def test_a_step_on_a_cpu_is_not_predicted():
    answer = answered(step_time, load_config("configs/llama2/pretrain_llama2_tiny.yaml"))
    assert answer.standing is Standing.NOT_PROVED
    assert answer.findings[0].key == "context.device_target"


def test_a_run_without_checkpoints_is_refuted():
    config = override_config(cluster_run(dp=2), {"callbacks": [{"type": "MFLossMonitor"}]})
    answer = checkpoints.answered(config)
    assert answer.standing is Standing.REFUTED
    assert answer.findings[0].key == "callbacks"


def test_checkpoints_are_as_large_as_they_are():
    config = load_config(SEVENTY)
    answer = checkpoints.answered(config)
    assert answer.standing is Standing.PROVED
    assert answer.figures["checkpoint"] == 12 * config.model.config.parameter_count()


def test_an_output_directory_that_is_a_file_is_refuted(tmp_path):
    (tmp_path / "out").write_text("")
    answer = answered(start, override_config(cluster_run(dp=2), {"output_dir": str(tmp_path / "out")}))
    assert answer.standing is Standing.REFUTED
    assert answer.findings[0].key == "output_dir"


def test_weights_that_are_not_there_are_refuted(tmp_path):
    answer = answered(start, override_config(cluster_run(dp=2), {"load_checkpoint": str(tmp_path / "none")}))
    assert answer.standing is Standing.REFUTED
    assert [finding.key for finding in answer.findings] == ["load_checkpoint"]


def test_a_fresh_directory_can_be_started_in(tmp_path):
    answer = answered(start, override_config(cluster_run(dp=2), {"output_dir": str(tmp_path / "out")}))
    assert answer.standing is Standing.PROVED
    assert not (tmp_path / "out").exists()


def test_findings_know_their_line(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(f"base: {SEVENTY}\nmodel:\n  model_config:\n    offset: [8, -4, 0, 0, 0, 0, 0, -4]\n")
    config = load_config(path)
    (finding,) = answered(step_time, config).findings
    found = located(config, finding)
    assert (found.file, found.line) == (str(path), 4)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("modle: 3\n", "modle"),
        ("model:\n  model_config:\n    offset: [1, 0, 0, 0, 0, 0, 0, 0]\n", "model.model_config.offset"),
    ],
)
def test_a_yaml_with_a_mistake_is_refuted_at_its_line(tmp_path, text, key):
    path = tmp_path / "run.yaml"
    path.write_text(f"base: {SEVENTY}\n{text}")
    with pytest.raises(UserError) as caught:
        load_config(path)
    proof = refused("run.yaml", caught.value)
    answer = proof.answer("configuration")
    assert (answer.standing, proof.verdict.value) == (Standing.REFUTED, "refuted")
    assert [(finding.file, finding.key) for finding in answer.findings] == [(str(path), key)]
    assert answer.findings[0].line == text.count("\n") + 1
