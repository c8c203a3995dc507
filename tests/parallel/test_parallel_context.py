"""What the compiler is told about a configuration, and what is refused before it would compute something else."""

import pytest
from small_cluster import cluster_run

from mindllm.errors import UserError
from mindllm.parallel.context import check_context, parallel_context
from mindllm.train.distributed_step import input_slices


def test_sizes_and_defaults():
    context = parallel_context(cluster_run(dp=2, tp=2, pp=2, micro=4), rank=5)
    assert context == {
        "parallel_mode": "semi_auto_parallel",
        "device_num": 8,
        "global_rank": 5,
        "pipeline_stages": 2,
        "gradients_mean": False,
        "enable_parallel_optimizer": False,
        "pipeline_config": {"pipeline_interleave": False, "pipeline_scheduler": "1f1b"},
        "full_batch": True,
    }


@pytest.mark.parametrize(
    ("shard_accumulators", "gather_again", "level"),
    [(False, False, "level1"), (True, False, "level2"), (False, True, "level3")],
)
def test_levels_of_the_sharded_optimizer(shard_accumulators, gather_again, level):
    options = {"gradient_accumulation_shard": shard_accumulators, "optimizer_weight_shard_size": 2}
    config = cluster_run(
        dp=4,
        parallel={"enable_parallel_optimizer": True, "parallel_optimizer_config": options},
        recompute_config={"parallel_optimizer_comm_recompute": gather_again},
    )
    assert parallel_context(config, 0)["parallel_optimizer_config"] == {
        "parallel_optimizer_threshold": 64,
        "optimizer_weight_shard_size": 2,
        "optimizer_level": level,
    }


def test_sliced_inputs_and_strategy_files():
    section = {"full_batch": False, "strategy_ckpt_save_file": "strategy/plan.ckpt"}
    config = cluster_run(dp=2, tp=2, parallel=section)
    context = parallel_context(config, 3)
    assert context["dataset_strategy"] == ((2, 1),) * 3
    assert "full_batch" not in context
    assert context["strategy_ckpt_config"] == {"save_file": "strategy/plan_rank_3.ckpt"}
    assert input_slices(config) == 2
    assert input_slices(cluster_run(dp=2)) == 1


@pytest.mark.parametrize(
    ("parallel", "recompute", "message"),
    [
        ({"parallel_mode": "data_parallel"}, {}, "parallel.parallel_mode: .*write semi_auto_parallel"),
        ({"gradients_mean": True}, {}, "parallel.gradients_mean: would divide gradients twice"),
        ({"pipeline_config": {"pipeline_scheduler": "gpipe"}}, {}, "pipeline_scheduler: needs .*interleave: true"),
        (
            {
                "enable_parallel_optimizer": True,
                "parallel_optimizer_config": {"gradient_accumulation_shard": True},
            },
            {"parallel_optimizer_comm_recompute": True},
            "recompute_config.parallel_optimizer_comm_recompute: .*remove .*gradient_accumulation_shard",
        ),
    ],
)
def test_values_that_would_give_wrong_gradients_are_refused(parallel, recompute, message):
    with pytest.raises(UserError, match=message):
        check_context(cluster_run(dp=2, parallel=parallel, recompute_config=recompute))


@pytest.mark.parametrize("strategy", [[[2, 1], [2, 1]], [[1, 2]] * 3, [[2, 1], [2, 1], [1, 1]]])
def test_columns_must_be_sliced_alike(strategy):
    config = cluster_run(dp=2, parallel={"full_batch": False, "dataset_strategy": strategy})
    with pytest.raises(UserError, match=r"parallel\.dataset_strategy: must split the batch of 3 columns alike"):
        input_slices(config)


def test_weights_gathered_again_in_a_pipeline_are_refused():
    """MindSpore shards the gradients there and not what they are added to."""
    section = {"enable_parallel_optimizer": True}
    again = {"parallel_optimizer_comm_recompute": True}
    config = cluster_run(pp=2, micro=2, parallel=section, recompute_config=again)
    with pytest.raises(
        UserError, match=r"parallel_optimizer_comm_recompute: MindSpore cannot compile .*accumulation_shard"
    ):
        check_context(config)


def test_sharded_accumulators_without_a_pipeline_are_refused():
    """MindSpore 2.10 cannot compile them; its next level can be."""
    section = {"enable_parallel_optimizer": True, "parallel_optimizer_config": {"gradient_accumulation_shard": True}}
    accumulating = {"runner_config": {"gradient_accumulation_steps": 2}}
    with pytest.raises(UserError, match=r"gradient_accumulation_shard: needs a pipeline .*comm_recompute: true"):
        check_context(cluster_run(dp=2, parallel=section, **accumulating))
    check_context(cluster_run(dp=2, pp=2, micro=2, parallel=section))
