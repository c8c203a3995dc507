"""Attention in one kernel: what masks and narrow heads cost; what copies hide."""

from dataclasses import replace

import pytest
from small_cluster import cluster_run

from mindllm.timing.configured import workload_of
from mindllm.timing.costs.layer import FLASH_BACKWARD, backward_work, forward_work
from mindllm.timing.costs.operators import attention_seconds, mask_seconds, operator_seconds
from mindllm.timing.costs.work import ATTENTION, Operator
from mindllm.timing.device import DEFAULT, read_device
from mindllm.timing.step import Pass, overlapped

DEVICE = read_device(DEFAULT)
LENGTH, HEADS, WIDTH = 4096, 4, 128
SCORES = LENGTH * LENGTH / 2 * HEADS
MODEL = {"num_layers": 1, "hidden_size": HEADS * WIDTH, "num_heads": HEADS, "n_kv_heads": HEADS, "seq_length": LENGTH}


def attention_of(reads_masks=False, whole_masks=False):
    """The kernel of one sequence, forward and backward."""
    run = workload_of(cluster_run(model=MODEL, runner_config={"batch_size": 1}))
    numerics = replace(run.numerics, reads_masks=reads_masks, whole_masks=whole_masks, compute="bfloat16")
    forward = forward_work(run.architecture.layers[0], float(run.rank_tokens), LENGTH, run.strategy, numerics)
    return [
        next(one for one in work if one.name.endswith("flash_attention")) for work in (forward, backward_work(forward))
    ]


def test_a_mask_of_every_pair_is_read_for_each_score_and_again_for_the_gradient():
    compressed, masked = attention_of(), attention_of(reads_masks=True)
    assert [one.masked for one in compressed] == [0, 0]
    assert [one.masked for one in masked] == [SCORES, SCORES]
    assert [one.flops for one in masked] == [one.flops for one in compressed]  # what is hidden is left out either way
    assert masked[1].flops == FLASH_BACKWARD * masked[0].flops
    for plain, one in zip(compressed, masked, strict=True):
        longer = operator_seconds(one, DEVICE) - operator_seconds(plain, DEVICE)
        assert longer == pytest.approx(SCORES / (DEVICE.memory_bandwidth.value * DEVICE.efficiency.memory.value))


def test_documents_have_every_score_computed_and_masked():
    assert [one.masked for one in attention_of(whole_masks=True)] == [2 * SCORES, 2 * SCORES]


def test_a_mask_takes_vector_cores_where_they_are_slower_than_memory():
    slow = DEVICE.model_copy(update={"vector_flops": DEVICE.vector_flops.model_copy(update={"value": 1e12})})
    assert mask_seconds(1e9, slow) == pytest.approx(8e9 / (1e12 * DEVICE.efficiency.vector.value))
    assert mask_seconds(0.0, slow) == 0.0


@pytest.mark.parametrize(("head", "longer"), [(128, 1.0), (64, 2.0), (32, 4.0)])
def test_a_score_of_a_narrow_head_takes_as_long_as_one_of_a_wide_head(head, longer):
    """At equal operations half as wide heads have twice the scores, and each has its softmax."""
    reached = DEVICE.efficiency.attention.value * DEVICE.matrix_rate("bfloat16")
    one = Operator("attention", ATTENTION, flops=1e12, head=head)
    assert attention_seconds(one, DEVICE) == pytest.approx(longer * 1e12 / reached)


def test_products_decide_where_heads_are_wide_and_where_the_device_says_no_size():
    wide = Operator("attention", ATTENTION, flops=1e12, head=512)
    assert attention_seconds(wide, DEVICE) == 1e12 / (DEVICE.matrix_rate("bfloat16") * DEVICE.efficiency.matrix.value)
    other = read_device("a100_80g")
    reached = other.efficiency.attention.value * other.matrix_rate("bfloat16")
    assert attention_seconds(replace(wide, head=32), other) == 1e12 / reached


@pytest.mark.parametrize(("copies", "left"), [(1, 1.0), (2, 0.5), (4, 1.0)])
def test_exchanges_hide_behind_two_copies_and_behind_no_other_number(copies, left):
    """MindSpore orders two copies alone."""
    assert overlapped(Pass({"matrix": 3.0}, {"AllReduce": 1.0}), copies).exchanged["AllReduce"] == left
