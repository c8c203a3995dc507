"""Multi-copy parallel: what is asked for, what it brings to a predicted step, and what a YAML of MindFormers becomes."""

from dataclasses import replace
from pathlib import Path

import pytest

from mindllm.config import load_config, override_config
from mindllm.errors import UserError
from mindllm.reduced_runs.model import single_device
from mindllm.timing.configured import workload_of
from mindllm.timing.device import DEFAULT, read_device
from mindllm.timing.step import Pass, overlapped, step_time

FORM = Path(__file__).parents[2] / "mindllm/verify/forms/copies.yaml"
DEVICE = read_device(DEFAULT)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("--runner_config.batch_size=3",), "must divide runner_config.batch_size 3 (value 2); write 1 or 3"),
        (("--parallel_config.model_parallel=1", "--parallel_config.use_seq_parallel=false"), "nothing to exchange"),
        (("--micro_batch_interleave_num=0",), "micro_batch_interleave_num"),
    ],
)
def test_copies_that_make_no_sense_are_refused(overrides, said):
    with pytest.raises(UserError) as error:
        load_config(FORM, overrides)
    assert said in str(error.value)


def test_one_device_has_no_copies():
    assert single_device(load_config(FORM)).micro_batch_interleave_num == 1


def test_exchanges_hide_behind_the_other_copy_as_far_as_it_computes():
    long = overlapped(Pass({"matrix": 3.0}, {"AllGather": 1.0, "ReduceScatter": 1.0}), 2)
    assert long.exchanged == {"AllGather": 0.5, "ReduceScatter": 0.5}
    short = overlapped(Pass({"matrix": 1.0}, {"AllReduce": 3.0}), 2)
    assert sum(short.exchanged.values()) == pytest.approx(2.5)
    alone = Pass({"matrix": 1.0}, {"AllReduce": 3.0})
    assert overlapped(alone, 1) is alone


def test_a_step_is_shorter_with_copies_where_products_are_large():
    wide = {"model.model_config.hidden_size": 4096, "model.model_config.intermediate_size": 11008}
    wide |= {"model.model_config.seq_length": 4096, "model.model_config.vocab_size": 32000}
    workload = workload_of(override_config(load_config(FORM), wide))
    assert workload.strategy.copies == 2
    alone = replace(workload, strategy=replace(workload.strategy, copies=1))
    assert 0.85 < step_time(workload, DEVICE).seconds / step_time(alone, DEVICE).seconds < 1
