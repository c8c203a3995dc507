"""Steps on pairs of answers: accumulation is a larger batch, figures are means over the global batch, frozen weights stay."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from mindspore import nn

from mindllm.config import load_config
from mindllm.data.chat.pairs import pair_sample
from mindllm.data.rows import Row
from mindllm.parallel import mesh_of
from mindllm.train.callbacks.figures import pair_figures, preference_line, unpaired_figures
from mindllm.train.engine import ReplicaEngine
from mindllm.train.engine.cluster_rank import ClusterRankEngine
from mindllm.train.job.ranks import Ranks

YAML = """
lr_schedule: {type: ConstantWarmUpLR, learning_rate: 1e-2}
train_dataset: {data_loader: {type: PreferenceDataLoader, config: {data_path: unused}}}
processor: {tokenizer: {vocab_file: unused}}
preference: {beta: 0.5}
context: {enable_graph_kernel: false, compile_cache: false}
runner_config: {batch_size: 4}
model:
  model_config:
    {vocab_size: 61, hidden_size: 16, num_layers: 1, num_heads: 4, intermediate_size: 24, seq_length: 16,
     pet_config: {lora_rank: 4}}
"""


def engine(*overrides):
    with open("run.yaml", "w", encoding="utf-8") as file:
        file.write(YAML)
    return ReplicaEngine(load_config("run.yaml", overrides))


def batch(seed, pairs=4):
    random = np.random.default_rng(seed)

    def row(length):
        return Row(random.integers(0, 61, length).astype(np.int32), np.arange(length) >= 2)

    samples = [pair_sample([row(int(random.integers(4, 9))) for _ in "cr"], 16) for _ in range(pairs)]
    return {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}


def test_accumulating_pairs_equals_one_large_batch_and_pulls_answers_apart():
    whole, parts = engine(), engine("--runner_config.batch_size=1", "--runner_config.gradient_accumulation_steps=4")
    frozen = {name: item.asnumpy().copy() for name, item in whole.frozen.items()}
    for step in range(3):
        one, four = (item.step(batch(step % 2), 1e-2, 1.0) for item in (whole, parts))
        assert four.tokens == one.tokens == 4
        assert four.loss == pytest.approx(one.loss, rel=1e-5)
        assert four.global_norm == pytest.approx(one.global_norm, rel=1e-4)
        figures = [pair_figures(item.counts()) for item in (whole, parts)]
        assert figures[1] == pytest.approx(figures[0], rel=1e-4, abs=1e-5)
        if step == 0:  # an adapter begins as nothing: the policy is the reference
            assert one.loss == pytest.approx(np.log(2), rel=1e-5)
            assert figures[0]["rewards/margins"] == pytest.approx(0, abs=1e-5)
    assert one.loss < np.log(2) - 0.05
    assert figures[0]["rewards/margins"] > 0.05
    assert all(np.array_equal(item.asnumpy(), frozen[name]) for name, item in whole.frozen.items())
    summed, pairs = whole.evaluate(batch(0))
    assert pairs == 4
    assert summed / pairs < np.log(2)


@pytest.mark.parametrize("kind", ["kto", "apo_zero_unpaired"])
def test_answers_that_are_desirable_or_not_are_pulled_apart(kind):
    whole = engine(f"--preference.loss_type={kind}")
    columns = batch(0)
    columns["loss_mask"][1::2] = np.roll(columns["loss_mask"][1::2], 1, axis=1)  # every other answer is not desirable
    for _ in range(4):
        result = whole.step(columns, 1e-2, 1.0)
        assert result.tokens == 4
    figures = unpaired_figures(whole.counts())
    assert result.loss < 0.5  # 1 - σ(0), where an adapter begins
    assert figures["rewards/chosen"] > 0 > figures["rewards/rejected"]
    assert figures["rewards/margins"] == pytest.approx(figures["rewards/chosen"] - figures["rewards/rejected"])
    assert figures["kl"] >= 0
    assert "kl: " in preference_line(figures)
    assert "accuracies" not in preference_line(figures)
    summed, answers = whole.evaluate(columns)
    assert answers == 4
    assert summed / answers < 0.5


def test_figures_of_answers_are_means_over_those_of_their_kind():
    """Rewards and log-probabilities of 3 desirable answers and 1 other; where all are of one kind there are none of the other."""
    figures = unpaired_figures({"load.pairs.probe": np.array([3.0, -2.0, -30.0, -20.0, 2.0, 3.0, 4.0])})
    assert figures == {
        "rewards/chosen": 1.0,
        "rewards/rejected": -2.0,
        "rewards/margins": 3.0,
        "logps/chosen": -10.0,
        "logps/rejected": -20.0,
        "kl": 0.5,
    }
    alone = unpaired_figures({"load.pairs.probe": np.array([3.0, 0.0, -30.0, 0.0, 2.0, 3.0, 3.0])})
    assert set(alone) == {"rewards/chosen", "logps/chosen", "kl"}
    assert unpaired_figures({}) == {}


def test_the_line_of_a_step():
    figures = {"rewards/chosen": 0.5, "rewards/rejected": -0.25, "rewards/margins": 0.75, "rewards/accuracies": 0.5}
    line = "{ rewards/chosen: 0.5000, rewards/rejected: -0.2500, rewards/margins: 0.7500, rewards/accuracies: 50.0% }"
    assert preference_line(figures) == line


def test_what_counted_nothing_has_no_figures():
    assert pair_figures({}) == {}
    assert pair_figures({"load.pairs.probe": np.zeros(6)}) == {}


@pytest.mark.parametrize("kind", ["orpo", "simpo"])
def test_without_a_reference_all_weights_learn_from_pairs(kind):
    options = (f"--preference.loss_type={kind}", "--model.model_config.pet_config=null")
    whole = engine(*options)
    parts = engine(*options, "--runner_config.batch_size=1", "--runner_config.gradient_accumulation_steps=4")
    for step in range(3):
        one, four = (item.step(batch(step % 2), 1e-2, 1.0) for item in (whole, parts))
        assert four.loss == pytest.approx(one.loss, rel=1e-5)
        if step == 0:
            first = one.loss
    assert one.loss < first
    assert not whole.frozen
    figures = pair_figures(whole.counts())
    assert figures["rewards/margins"] > 0
    summed, pairs = whole.evaluate(batch(0))
    assert pairs == 4
    assert summed / pairs < first


@dataclass
class OtherStage:
    """Where a rank of the first stage meets one of the last, which has the loss and what it counted of pairs."""

    has: tuple[float, ...]

    def sum(self, values):
        assert list(values) == [0.0] * len(self.has)
        return list(self.has)


def test_ranks_of_the_first_stage_know_the_figures_of_the_last():
    with open("run.yaml", "w", encoding="utf-8") as file:
        file.write(YAML)
    engine = object.__new__(ClusterRankEngine)
    stages = "--parallel_config={pipeline_stage: 2, micro_batch_num: 2}"
    config = load_config("run.yaml", ["--use_parallel", stages, "--model.model_config.num_layers=2"])
    engine.config, engine.mesh = config, mesh_of(config)
    engine.ranks = Ranks(0, 2, OtherStage((0.5, 1.0, -1.0, 2.0, -6.0, -8.0, 2.0)))
    engine._step, engine.simulated = nn.Cell(), False
    loss, *engine._pairs = engine._from_last_stage([0.0, *engine._local_pair_figures()])
    assert loss == 0.5
    assert pair_figures(engine.counts())["rewards/margins"] == 1.0
