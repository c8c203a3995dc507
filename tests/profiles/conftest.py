"""A run of eight ranks in two stages, and its predicted step."""

import pytest

from mindllm.config import load_config
from mindllm.timing.configured import workload_of
from mindllm.timing.device import DEFAULT, read_device
from mindllm.timing.step import step_time

YAML = "configs/llama2/pretrain_llama2_13b.yaml"
KEYS = [
    "--model.model_config.num_layers=4",
    "--parallel_config.data_parallel=2",
    "--parallel_config.model_parallel=2",
    "--parallel_config.pipeline_stage=2",
    "--parallel_config.micro_batch_num=4",
]


@pytest.fixture(scope="session")
def config():
    return load_config(YAML, KEYS)


@pytest.fixture(scope="session")
def step(config):
    return step_time(workload_of(config), read_device(DEFAULT))
