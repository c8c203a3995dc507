"""Small runs for the tests of the configuration."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from mindllm.config import RunConfig, load_config
from mindllm.errors import UserError

MINIMAL: dict[str, Any] = {
    "model": {
        "model_config": {"vocab_size": 96, "hidden_size": 64, "num_layers": 8, "num_heads": 8, "seq_length": 32},
    },
    "lr_schedule": {"type": "CosineWithWarmUpLR", "learning_rate": 1e-3},
    "train_dataset": {"data_loader": {"config": {"data_path": "data/corpus"}}},
}


@pytest.fixture
def minimal() -> dict[str, Any]:
    """The smallest run, as a tree that a test may change."""
    return copy.deepcopy(MINIMAL)


@pytest.fixture(scope="session")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """The smallest run, loaded."""
    path = tmp_path_factory.mktemp("small") / "run.yaml"
    path.write_text(yaml.safe_dump(MINIMAL), encoding="utf-8")
    return load_config(path)


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Writes YAML (text or a tree) to a file of the temporary directory."""

    def write_yaml(data: dict[str, Any] | str, name: str = "run.yaml") -> Path:
        path = tmp_path / name
        path.write_text(data if isinstance(data, str) else yaml.safe_dump(data, sort_keys=False), encoding="utf-8")
        return path

    return write_yaml


@pytest.fixture
def load(write, minimal) -> Callable[..., RunConfig]:
    """Loads the smallest run with some options."""
    return lambda *overrides: load_config(write(minimal), overrides)


@pytest.fixture
def refused(write, minimal) -> Callable[..., str]:
    """Loads the smallest run with some options (or a given text) and returns the error's message."""

    def load_and_catch(*overrides: str, text: str | None = None) -> str:
        with pytest.raises(UserError) as caught:
            load_config(write(minimal if text is None else text), overrides)
        return str(caught.value)

    return load_and_catch
