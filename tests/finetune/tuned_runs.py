"""Small runs that are tuned, as an engine, and random batches for them."""

from __future__ import annotations

from typing import Any

import numpy as np
import yaml

from mindllm.config import RunConfig, load_config
from mindllm.models.weights import model_weights
from mindllm.train.engine import ReplicaEngine
from mindllm.weight_files import initial_weights

SIZES = {"vocab_size": 61, "hidden_size": 16, "num_layers": 2, "num_heads": 4, "n_kv_heads": 2, "intermediate_size": 24}
RUN: dict[str, Any] = {
    "lr_schedule": {"type": "ConstantWarmUpLR", "learning_rate": 1e-2},
    "train_dataset": {"data_loader": {"config": {"data_path": "unused"}}},
    "context": {"enable_graph_kernel": False, "compile_cache": False},
    "runner_config": {"batch_size": 4, "train_steps": 8},
    "optimizer": {"eps": 1e-4},
}


def tuned_run(pet: dict[str, Any] | None, **sizes: Any) -> RunConfig:
    """A run on one CPU; keywords are keys of the architecture."""
    model = {**SIZES, "seq_length": 8, **sizes, "pet_config": pet}
    with open("run.yaml", "w", encoding="utf-8") as file:
        yaml.safe_dump({**RUN, "model": {"model_config": model}}, file)
    return load_config("run.yaml")


def batch(seed: int, rows: int = 4, length: int = 8) -> dict[str, np.ndarray]:
    """Random tokens, some of which are masked."""
    random = np.random.default_rng(seed)
    tokens = random.integers(0, SIZES["vocab_size"], (rows, length + 1)).astype(np.int32)
    mask = (random.random((rows, length)) < 0.7).astype(np.float32)
    return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:], "loss_mask": mask}


def base_weights(config: RunConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights of the model that is tuned."""
    random = np.random.default_rng(seed)
    shapes = config.model.config.base.architecture.weight_shapes()
    return {name: random.normal(0, 0.1, shape).astype(np.float32) for name, shape in shapes.items()}


def beside(config: RunConfig, base: dict[str, np.ndarray]) -> ReplicaEngine:
    """A run that begins with these frozen weights."""
    engine = ReplicaEngine(config)
    engine.load_state(initial_weights(config.model.config, base))
    return engine


def weights(engine: ReplicaEngine) -> dict[str, np.ndarray]:
    """All weights as they are now, frozen ones too."""
    return {name: item.asnumpy().copy() for name, item in model_weights(engine.model).items()}


def snapshot(engine: ReplicaEngine) -> dict[str, np.ndarray]:
    """What a checkpoint would hold."""
    (held,) = engine.local_state().values()
    return {name: np.asarray(item).copy() for part in (held.weights, held.optimizer) for name, item in part.items()}
