"""The libraries that read data sets keep what they made of them: not in the home of whoever runs the tests."""

import os

import pytest

os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"


@pytest.fixture(scope="session")
def hub(tmp_path_factory):
    """A directory of tiny data sets."""
    datasets = pytest.importorskip("datasets")
    pytest.importorskip("lm_eval")
    from tiny_hub import write_data

    datasets.config.HF_DATASETS_CACHE = tmp_path_factory.mktemp("cache")
    return write_data(tmp_path_factory.mktemp("hub"))
