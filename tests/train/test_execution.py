"""What executes a run follows from its YAML and the environment; what cannot be executed is refused with what to write."""

import pytest
from small_cluster import cluster_run

from mindllm.errors import UserError
from mindllm.train.job.execution import Executor, describe, execution_of, is_sharded

CPU = {"device_target": "CPU"}
SHARDED = {"enable_parallel_optimizer": True}


def of(environment=None, **sections):
    return execution_of(cluster_run(**sections), environment or {})


def launched(count, rank=1):
    return {"MS_WORKER_NUM": str(count), "RANK_ID": str(rank)}


def simulated(size, rank, level="1"):
    return {"MS_SIMULATION_LEVEL": level, "RANK_SIZE": str(size), "RANK_ID": str(rank)}


@pytest.mark.parametrize(
    ("environment", "sections", "executor", "rank", "count"),
    [
        ({}, {}, Executor.REPLICA, 0, 1),
        ({}, {"context": CPU}, Executor.REPLICA, 0, 1),
        ({}, {"dp": 2, "context": CPU}, Executor.LOCKSTEP, 0, 1),
        ({}, {"tp": 2, "pp": 2, "micro": 2, "context": CPU}, Executor.LOCKSTEP, 0, 1),
        (launched(2), {"dp": 2, "context": CPU}, Executor.REPLICA, 1, 2),
        (launched(4, 3), {"dp": 2, "tp": 2}, Executor.CLUSTER_RANK, 3, 4),
        (simulated(4, 2), {"dp": 2, "pp": 2, "micro": 2}, Executor.CLUSTER_RANK, 2, 4),
        (simulated(1, 0), {}, Executor.REPLICA, 0, 1),
    ],
)
def test_who_executes(environment, sections, executor, rank, count):
    execution = of(environment, **sections)
    assert execution.executor is executor
    assert (execution.ranks.rank, execution.ranks.count) == (rank, count)
    assert execution.ranks.simulated == ("MS_SIMULATION_LEVEL" in environment)


@pytest.mark.parametrize(
    ("environment", "sections", "wanted"),
    [
        (
            {},
            {"dp": 2},
            [
                "2 Ascend devices",
                'mindllm launch --workers 2 "train --config ',
                "device_target: CPU",
                "MS_SIMULATION_LEVEL=1",
            ],
        ),
        (
            launched(2),
            {"dp": 4, "context": CPU},
            ["describes 4 devices, but 2 processes were started", "data_parallel: 2"],
        ),
        (launched(2), {"tp": 2, "context": CPU}, ["model_parallel 2", "without the launcher"]),
        (launched(2), {"dp": 2, "context": CPU, "parallel": SHARDED}, ["enable_parallel_optimizer true"]),
        (simulated(4, 0), {"dp": 2}, ["RANK_SIZE is 4", "RANK_SIZE=2"]),
        (simulated(2, 2), {"dp": 2}, ["ranks 0 to 1", "RANK_ID is 2"]),
        (simulated("two", 0), {"dp": 2}, ["RANK_SIZE is 'two'"]),
        (simulated(2, 0, level="3"), {"dp": 2}, ["MS_SIMULATION_LEVEL 3", "MS_SIMULATION_LEVEL=1"]),
        (simulated(2, 0), {"dp": 2, "context": CPU}, ["context.device_target", "write Ascend"]),
    ],
)
def test_what_cannot_be_executed_is_refused_with_advice(environment, sections, wanted):
    with pytest.raises(UserError) as caught:
        of(environment, **sections)
    for words in wanted:
        assert words in str(caught.value)


def test_shared_optimizer_state_is_sharded_too():
    assert not is_sharded(cluster_run(dp=2))
    assert is_sharded(cluster_run(dp=2, parallel=SHARDED))
    assert is_sharded(cluster_run(tp=2))


def test_the_log_says_who_executes():
    config = cluster_run(dp=2, tp=2, context=CPU)
    assert describe(config, execution_of(config, {})) == (
        "dp 2 x tp 2 x pp 1: all 4 ranks run in lockstep in this process"
    )
    config = cluster_run(dp=2)
    assert "rank 1 of 2, in MindSpore's dry run" in describe(config, execution_of(config, simulated(2, 1)))
