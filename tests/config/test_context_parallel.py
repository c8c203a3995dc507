"""Sequences that several devices share: what is counted, and what is refused before anything is compiled."""

import pytest
from small_cluster import cluster_run

from mindllm.errors import UserError

ULYSSES = {"context_parallel_algo": "ulysses_cp"}
RING = {"context_parallel": 2, "context_parallel_algo": "ring_cp"}
CLIPPED = {"type": "Muon", "qk_clip_threshold": 10.0}
BALANCED = {"context_parallel": 2, "context_parallel_balanced": True}
DOCUMENTS = {"data_loader": {"config": {"data_path": "corpus", "reset_attention_mask": True}}}
EXPERTS = {"model_type": "mixtral", "expert_num": 4, "num_experts_chosen": 2}


def test_devices_of_a_sequence_are_counted():
    sizes = cluster_run(dp=2, tp=2, context_parallel=4).parallel_config
    assert (sizes.device_num, sizes.stage_device_num) == (16, 16)
    assert sizes.exchanges_heads is False


def test_a_ring_has_no_masks_of_rows():
    """In a pipeline positions come from the batch, and masks with them, but for keys that go round."""
    stages = {"pp": 2, "micro": 2}
    assert [
        cluster_run(**stages, **form).has_row_masks
        for form in ({"context_parallel": 2}, {"context_parallel": 2, **ULYSSES}, RING)
    ] == [True, True, False]


def test_replicas_of_weights_are_those_of_data_and_context_parallelism():
    optimizer = {"enable_parallel_optimizer": True, "parallel_optimizer_config": {"optimizer_weight_shard_size": 4}}
    cluster_run(dp=2, context_parallel=2, parallel=optimizer)
    with pytest.raises(UserError, match=r"must be -1 or divide data_parallel 2 \(value 4\)"):
        cluster_run(dp=2, parallel=optimizer)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"context_parallel": 2, "model": {"seq_length": 31}},
            r"seq_length: is not divisible by context_parallel 2 \(value 31\); write 30 or 32",
        ),
        (
            {"context_parallel": 2, "tp": 2, "use_seq_parallel": True, "model": {"seq_length": 30}},
            r"context_parallel 2 x model_parallel 2 \(use_seq_parallel\) \(value 30\); write 28 or 32",
        ),
        (
            {"context_parallel": 4, "tp": 2, **ULYSSES},
            r"num_heads: is not divisible by model_parallel 2 x context_parallel 4",
        ),
        ({"context_parallel": 4, **ULYSSES}, r"n_kv_heads: .* \(value 2\); write context_parallel 2, or colossalai_cp"),
        (ULYSSES, r"context_parallel_algo: requires context_parallel above 1"),
        (
            {"context_parallel": 2, "context_parallel_algo": "hybrid_cp"},
            "hybrid_cp is not available: .* write ulysses_cp",
        ),
        (RING | {"context_parallel": 1}, r"context_parallel_algo: requires context_parallel above 1"),
        ({**RING, "train_dataset": DOCUMENTS}, "context_parallel_algo: with masks of documents"),
        ({**RING, "model": {"sliding_window": 8}}, "context_parallel_algo: with a window"),
        ({**RING, "model": {"use_flash_attention": False}}, "context_parallel_algo: composed attention"),
        ({**RING, "model": {"position_embedding_type": "alibi"}}, "context_parallel_algo: composed attention"),
        ({**RING, "optimizer": CLIPPED}, "context_parallel_algo: the largest logits of a ring are not kept"),
        (
            {"context_parallel": 2, "model": EXPERTS},
            r"expert_parallel: 1 groups of 1 ranks do not fill .* x context_parallel 2 x .*; write 2",
        ),
        (
            {**BALANCED, "expert_parallel": 2, "model": {**EXPERTS, "capacity_factor": 1.0}},
            "context_parallel_balanced: experts take the first tokens of a sequence",
        ),
        (
            {"context_parallel": 4, "model": {"seq_length": 65536, "use_flash_attention": False}},
            r"seq_length: composed attention .* \[seq, seq\], 16 GB each \(value 65536\); write at most 32768",
        ),
        (
            {"context_parallel": 2, **ULYSSES, "model": {"n_kv_heads": 4, "position_embedding_type": "alibi"}},
            "context_parallel_algo: parts of ALiBi's slopes .* write colossalai_cp",
        ),
        ({"context_parallel": 2, "model": {"loss_chunks": 32}}, "loss_chunks: must divide the 16 tokens of each rank"),
        ({**BALANCED, **ULYSSES}, "context_parallel_balanced: with ulysses_cp every rank has whole sequences"),
        (
            {"context_parallel_balanced": True},
            "context_parallel_balanced: requires context_parallel above 1",
        ),
        (
            {**BALANCED, "model": {"seq_length": 30}},
            r"context_parallel 2 x 2 \(context_parallel_balanced\) .* write 28 or 32",
        ),
        ({**BALANCED, "model": {"sliding_window": 8}}, "context_parallel_balanced: windows are as long everywhere"),
        ({**BALANCED, "model": {"use_flash_attention": False}}, "context_parallel_balanced: composed attention"),
        ({**BALANCED, "train_dataset": DOCUMENTS}, "context_parallel_balanced: masks of documents are computed whole"),
        ({**BALANCED, "pp": 2, "micro": 2}, "context_parallel_balanced: masks are computed whole in a pipeline"),
        ({"dp": 3, "context_parallel": 2}, "data_parallel: makes 6 devices, and MindSpore compiles for"),
    ],
)
def test_what_cannot_be_shared_is_refused(changes, message):
    with pytest.raises(UserError, match=message):
        cluster_run(**changes)
