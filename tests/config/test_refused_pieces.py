"""What is said of sequences that go through a pipeline in pieces, before anything is built."""

import pytest
from small_cluster import cluster_run

from mindllm.config import override_config
from mindllm.errors import UserError

SCHEDULER = "parallel.pipeline_config.pipeline_scheduler"


def run(schedule="seqpipe", pieces=2, micro=2, pp=2, tp=1, model=None, **sections):
    pipeline = {"pipeline_interleave": True, "pipeline_scheduler": schedule}
    sections["parallel"] = {**sections.get("parallel", {}), "pipeline_config": pipeline}
    return cluster_run(pp=pp, tp=tp, micro=micro, model=model, seq_split_num=pieces, **sections)


CHUNKS = {"num_layers": 8, "pp_interleave_num": 2}
MIXTRAL = {"model_type": "mixtral", "expert_num": 4, "num_experts_chosen": 2}


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"schedule": "1f1b"}, "1f1b orders whole sequences"),
        ({"pp": 1, "micro": 1, "schedule": "1f1b"}, "requires pipeline_stage above 1"),
        ({"pieces": 3}, "must divide the tokens of seq_length 32"),
        (
            {"pieces": 8, "tp": 8, "use_seq_parallel": True, "model": {"num_heads": 8, "n_kv_heads": 8}},
            "of each of 8 ranks",
        ),
        ({"pieces": 2, "micro": 1, "pp": 4, "model": {"num_layers": 4}}, "must be at least 2 for 2 pieces of each"),
        ({"schedule": "seqvpp"}, "orders the pieces of several chunks per stage"),
        ({"schedule": "seqsmartvpp", "pieces": 4, "model": CHUNKS}, "at most as many pieces as stages, 2"),
        ({"context_parallel": 2, "model": {"use_flash_attention": True}}, "are not cut again"),
        ({"swap_config": {"swap": True}}, "not moved to the host"),
        ({"model": MIXTRAL}, "experts do not take pieces"),
        ({"model": {"sliding_window": 8}}, "windows of attention are not moved"),
        ({"model": {"attention_dropout": 0.1}}, "drawn for whole sequences"),
        ({"model": {"loss_chunks": 2}}, "the loss of a piece cannot be computed in chunks"),
    ],
)
def test_what_pieces_cannot_be_is_named_with_its_key(asked, words):
    with pytest.raises(UserError) as caught:
        run(**asked)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("micro_batch_interleave_num", 2, "micro_batch_interleave_num makes copies"),
        ("do_eval", True, "text is not evaluated in pieces"),
        (
            "parallel",
            {"enable_parallel_optimizer": True, "parallel_optimizer_config": {"gradient_accumulation_shard": True}},
            "gradient_accumulation_shard",
        ),
    ],
)
def test_what_a_run_with_pieces_cannot_have_is_named(key, value, words):
    with pytest.raises(UserError) as caught:
        override_config(run(tp=2), {key: value})
    assert words in str(caught.value)


def test_pieces_fill_a_pipeline_that_has_few_micro_batches():
    assert run(pieces=4, micro=1, pp=4, model={"num_layers": 4}).parallel_config.seq_split_num == 4
