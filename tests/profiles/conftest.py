"""A run of eight ranks in two stages, and its predicted step."""

import pytest
from profile_maker import small_run

from mindllm.timing.configured import workload_of
from mindllm.timing.device import DEFAULT, read_device
from mindllm.timing.step import step_time


@pytest.fixture(scope="session")
def config():
    return small_run()[2]


@pytest.fixture(scope="session")
def step(config):
    return step_time(workload_of(config), read_device(DEFAULT))
