"""Small runs on several devices, for the tests of sharding, plans and compiled graphs."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import yaml

from mindllm.config import RunConfig, load_config

MODEL = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_layers": 2,
    "num_heads": 4,
    "n_kv_heads": 2,
    "intermediate_size": 96,
    "seq_length": 32,
    "compute_dtype": "float16",
}
RUN: dict[str, Any] = {
    "use_parallel": True,
    "context": {"device_target": "Ascend"},
    "parallel": {"parallel_optimizer_config": {"parallel_optimizer_threshold": 0}},
    "runner_config": {"batch_size": 2, "train_steps": 10},
    "lr_schedule": {"type": "ConstantWarmUpLR", "learning_rate": 1e-3},
    "train_dataset": {"data_loader": {"config": {"data_path": "corpus"}}},
    "model": {"model_config": MODEL},
}


def cluster_run(
    dp: int = 1, tp: int = 1, pp: int = 1, micro: int = 1, model: dict[str, Any] | None = None, **sections: Any
) -> RunConfig:
    """A run of a two-layer Llama on ``dp * tp * pp`` devices.

    ``model`` changes keys of ``model_config``; other keywords are keys of ``parallel_config`` or whole sections.
    """
    tree = {**RUN, "model": {"model_config": {**MODEL, **(model or {})}}}
    sizes = {"data_parallel": dp, "model_parallel": tp, "pipeline_stage": pp, "micro_batch_num": micro}
    for key, value in sections.items():
        if isinstance(value, dict) or key in tree:
            tree[key] = {**tree.get(key, {}), **value} if isinstance(value, dict) else value
        else:
            sizes[key] = value
    tree["parallel_config"] = sizes
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "run.yaml"
        path.write_text(yaml.safe_dump(tree), encoding="utf-8")
        return load_config(path)
