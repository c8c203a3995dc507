"""The compiled steps: accumulation is a larger batch, an overflow changes nothing, clipping bounds, loss is per token."""

import numpy as np
import pytest
from mindspore import Tensor

from mindllm.config import load_config
from mindllm.data.rows import Row, assemble
from mindllm.train.engine import ReplicaEngine
from mindllm.train.step import LocalNorm

YAML = """
lr_schedule: {type: ConstantWarmUpLR, learning_rate: 1e-2}
train_dataset: {data_loader: {config: {data_path: unused}}}
context: {enable_graph_kernel: false, compile_cache: false}
runner_config: {batch_size: 4}
model:
  model_config:
    {vocab_size: 61, hidden_size: 16, num_layers: 1, num_heads: 4, n_kv_heads: 2, intermediate_size: 24, seq_length: 8}
"""


def engine(*overrides):
    with open("run.yaml", "w", encoding="utf-8") as file:
        file.write(YAML)
    return ReplicaEngine(load_config("run.yaml", overrides))


def batch(seed=0, rows=4, kept=0.7):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 61, (rows, 9)).astype(np.int32)
    mask = (rng.random((rows, 8)) < kept).astype(np.float32)
    return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:], "loss_mask": mask}


def weights(some_engine):
    return {name: weight.asnumpy().copy() for name, weight in some_engine.weights.items()}


def test_accumulating_unequal_parts_equals_one_large_batch():
    whole, parts = engine(), engine("--runner_config.batch_size=1", "--runner_config.gradient_accumulation_steps=4")
    for step in range(3):
        one, four = (item.step(batch(step), 1e-2, 1.0) for item in (whole, parts))
        assert four.tokens == one.tokens
        assert four.loss == pytest.approx(one.loss, rel=1e-5)
        assert four.global_norm == pytest.approx(one.global_norm, rel=1e-4)
    for name, weight in weights(whole).items():
        np.testing.assert_allclose(weights(parts)[name], weight, atol=2e-5, err_msg=name)


def test_whether_a_step_overflows_does_not_depend_on_how_its_batch_is_cut():
    """The least power of two at which the whole batch overflows is that of every cut."""
    whole = engine()
    low, high = 0, 127
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if whole.step(batch(), 0.0, 2.0**middle).overflow else (middle, high)
    assert 0 < low < 126
    for rows in (2, 1):
        parts = engine(f"--runner_config.batch_size={rows}", f"--runner_config.gradient_accumulation_steps={4 // rows}")
        assert [parts.step(batch(), 0.0, 2.0**power).overflow for power in (low, high)] == [False, True]


def test_the_loss_scale_changes_neither_loss_nor_update():
    plain, scaled = engine(), engine()
    results = plain.step(batch(), 1e-2, 1.0), scaled.step(batch(), 1e-2, 1024.0)
    assert results[1].loss == pytest.approx(results[0].loss, rel=1e-6)
    assert results[1].global_norm == pytest.approx(results[0].global_norm, rel=1e-5)
    for name, weight in weights(plain).items():
        np.testing.assert_allclose(weights(scaled)[name], weight, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    "options", [(), ("--runner_config.batch_size=2", "--runner_config.gradient_accumulation_steps=2")]
)
def test_an_overflow_leaves_weights_and_state_and_the_next_step_is_as_if_it_had_not_been(options):
    disturbed, quiet = engine(*options), engine(*options)
    before = weights(disturbed)
    result = disturbed.step(batch(), 1e-2, 3e38)
    assert result.overflow
    for name, weight in weights(disturbed).items():
        np.testing.assert_array_equal(weight, before[name], err_msg=name)
    disturbed.step(batch(1), 1e-2, 1.0)
    quiet.step(batch(1), 1e-2, 1.0)
    for name, weight in weights(quiet).items():
        np.testing.assert_array_equal(weights(disturbed)[name], weight, err_msg=name)
    for name, state in quiet.optimizer_state.items():
        np.testing.assert_array_equal(disturbed.optimizer_state[name].asnumpy(), state.asnumpy(), err_msg=name)


def test_tokens_without_loss_do_not_count():
    masked, cut = engine(), engine()
    data = batch(kept=1.0)
    data["loss_mask"][2:] = 0.0
    first_rows = {name: np.concatenate([array[:2], array[:2]]) for name, array in data.items()}
    assert masked.step(data, 0.0, 1.0).loss == pytest.approx(cut.step(first_rows, 0.0, 1.0).loss, rel=1e-5)
    summed, tokens = masked.evaluate(data)
    assert tokens == 16
    assert summed / tokens == pytest.approx(cut.evaluate(first_rows)[0] / 32, rel=1e-5)


def test_clipping_scales_the_gradients_to_the_largest_norm():
    free = engine("--runner_wrapper.use_clip_grad=false", "--optimizer.betas=[0.0,0.0]", "--optimizer.weight_decay=0")
    clipped = engine("--runner_wrapper.max_grad_norm=0.01", "--optimizer.betas=[0.0,0.0]", "--optimizer.weight_decay=0")
    norms = [item.step(batch(), 0.0, 1.0).global_norm for item in (free, clipped)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)
    moment = "adam_m.model.layers.0.attention.wq.weight"
    first = [item.optimizer_state[moment].asnumpy() for item in (free, clipped)]
    np.testing.assert_allclose(first[1], first[0] * 0.01 / norms[0], rtol=1e-3, atol=1e-9)


def test_initial_weights_depend_on_seed_and_name_only():
    shallow, deep, other = engine("--model.model_config.num_layers=1"), engine(), engine("--seed=1")
    name = "model.layers.0.feed_forward.w3.weight"
    np.testing.assert_array_equal(weights(shallow)[name], weights(deep)[name])
    assert not np.array_equal(weights(other)[name], weights(deep)[name])
    assert weights(deep)[name].std() == pytest.approx(0.02, rel=0.1)


def test_what_is_not_finite_is_named():
    item = engine()
    assert item.not_finite(batch()) == []
    name = "model.layers.0.ffn_norm.weight"
    poisoned = item.weights[name].asnumpy().copy()
    poisoned[3] = np.inf
    import mindspore as ms

    item.weights[name].set_data(ms.Tensor(poisoned))
    assert item.not_finite(batch()) == [f"weight {name}"]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_lower_precision_follows_fp32_closely_but_is_not_fp32(dtype):
    exact, rounded = engine(), engine(f"--model.model_config.compute_dtype={dtype}")
    losses = [[item.step(batch(step), 1e-2, 1.0).loss for step in range(3)] for item in (exact, rounded)]
    np.testing.assert_allclose(losses[1], losses[0], rtol=2e-2)
    assert losses[1] != losses[0]


def test_a_run_on_packs_learns_what_its_rows_alone_would_teach():
    """The engine of a run, with the columns its batches have."""
    loader = "--train_dataset.data_loader"
    packing = (f"{loader}.type=CommonDataLoader", f"{loader}.config.packing", "--processor.tokenizer.vocab_file=unused")
    rng = np.random.default_rng(0)
    rows = [Row(rng.integers(0, 61, length).astype(np.int32), np.ones(length, bool)) for length in (4, 5, 3, 6)]
    packs = [assemble(part, 8, packed=True) for part in (rows[:2], rows[2:])]
    alone = [assemble([row], 8, packed=False) for row in rows]
    results = []
    for options, samples in ((packing, packs), ((), alone)):
        item = engine(*options)
        columns = {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}
        results.append((item.step(columns, 1e-2, 1.0), item.evaluate(columns)))
    (packed, packed_after), (single, single_after) = results
    assert packed.tokens == single.tokens == 14
    assert packed.loss == pytest.approx(single.loss, rel=1e-5)
    assert packed.global_norm == pytest.approx(single.global_norm, rel=1e-4)
    assert packed_after[0] == pytest.approx(single_after[0], rel=1e-4)


def test_a_model_that_cannot_keep_documents_apart_says_so():
    sample = assemble([Row(np.arange(4, dtype=np.int32), np.ones(4, bool))], 8, packed=True)
    with pytest.raises(ValueError, match="without document_masks"):
        engine().evaluate({name: array[None] for name, array in sample.items()})


def test_the_norm_of_a_million_gradients_is_exact():
    rng = np.random.default_rng(0)
    gradients = [(rng.standard_normal(shape) * 1e-3).astype(np.float32) for shape in ((4096, 256), (256,))]
    gradients[0][:50] *= 30
    exact = np.sqrt(sum(np.square(gradient.astype(np.float64)).sum() for gradient in gradients))
    found = LocalNorm()(tuple(map(Tensor, gradients))).asnumpy()
    assert float(found) == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("parts", [1, 2])
def test_state_that_is_loaded_after_steps_is_the_state_of_the_next_one(parts):
    """A step of two graphs has weights that both read: each must see what was loaded, and so must the graph that evaluates."""
    keys = (f"--runner_config.batch_size={4 // parts}", f"--runner_config.gradient_accumulation_steps={parts}")
    used, fresh = engine(*keys), engine(*keys)
    begun = {name: weight.asnumpy().copy() for name, weight in {**used.weights, **used.optimizer_state}.items()}
    for seed in range(2):
        used.step(batch(seed), 1e-2, 1.0)
        used.evaluate(batch(9))
    used.load_state(begun)
    assert used.evaluate(batch(9)) == fresh.evaluate(batch(9))
    for seed in (5, 6):
        assert used.step(batch(seed), 1e-2, 1.0) == fresh.step(batch(seed), 1e-2, 1.0)
        assert used.evaluate(batch(9)) == fresh.evaluate(batch(9))
    for name, weight in weights(fresh).items():
        np.testing.assert_array_equal(weights(used)[name], weight, err_msg=name)
