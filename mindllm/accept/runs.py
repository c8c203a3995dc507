"""The small runs: their model, their text, and their configuration under the layout of a claim.

There are two sizes. On a device the model is large enough for its memory and its matrix products to say something, and small
enough for one CPU to compute the same losses in minutes. Processes of a CPU get the smaller one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mindllm.accept.claims import BATCH, Claim, Keys, Shape
from mindllm.config import RunConfig, load_config, override_config
from mindllm.data import IndexedWriter
from mindllm.data.indexed import index_path, smallest_dtype

Target = Literal["CPU", "Ascend"]
SEED, DOCUMENTS = 42, 64
RUNS = "runs"  # below the output directory


@dataclass(frozen=True)
class Size:
    """The model and the length of the runs.

    Attributes:
        model: keys of ``model_config``.
        experts: further keys of a mixture of experts.
        steps: that each run trains; a checkpoint that is resumed is of half of them.
        profiled: first step of those that are profiled, which are not timed; 0: none are.
        loss_tolerance: nats by which a loss may differ from that of one CPU device.
    """

    model: Mapping[str, Any]
    experts: Mapping[str, Any]
    steps: int
    profiled: int
    loss_tolerance: float

    @property
    def half(self) -> int:
        """The step of the checkpoint that is resumed."""
        return self.steps // 2


MIXTURE = {
    "model_type": "mixtral", "expert_num": 8, "num_experts_chosen": 2, "capacity_factor": 2.0,
    "aux_loss_types": ["expert"], "aux_loss_factors": [0.01],
}  # fmt: skip
SIZES: dict[Target, Size] = {
    "CPU": Size(
        {
            "vocab_size": 256, "hidden_size": 64, "num_layers": 4, "num_heads": 8, "n_kv_heads": 8,
            "intermediate_size": 96, "seq_length": 64, "compute_dtype": "float32",
        },
        MIXTURE, steps=4, profiled=0, loss_tolerance=1e-4,
    ),
    "Ascend": Size(
        {
            "vocab_size": 8192, "hidden_size": 1024, "num_layers": 4, "num_heads": 8, "n_kv_heads": 8,
            "intermediate_size": 2816, "seq_length": 512, "compute_dtype": "bfloat16",
        },
        {**MIXTURE, "intermediate_size": 768}, steps=8, profiled=7, loss_tolerance=5e-3,
    ),
}  # fmt: skip
"""The tolerance of a CPU is a hundred times what was measured; that of a device is assumed: none was at hand."""


def write_text(directory: Path, size: Size) -> Path:
    """Write the corpus of the runs, the same numbers on every machine, and return its prefix."""
    prefix, vocabulary = directory / "corpus", size.model["vocab_size"]
    if index_path(prefix).exists():
        return prefix
    generator = np.random.default_rng(SEED)
    with IndexedWriter(prefix, smallest_dtype(vocabulary)) as writer:
        for _ in range(DOCUMENTS):
            writer.append(np.cumsum(generator.integers(1, 4, size=4 * size.model["seq_length"])) * 7 % vocabulary)
            writer.end_document()
    return prefix


def base_run(size: Size, target: Target, experts: bool, corpus: Path, output: Path, batch: int = BATCH) -> RunConfig:
    """Return the run on one device of a kind, which all layouts change; ``batch``: sequences of a step."""
    profile = {"profile": True, "profile_start_step": size.profiled, "profile_stop_step": size.steps}
    return load_config(
        {
            "seed": SEED,
            "output_dir": str(output),
            "run_mode": "train",
            "use_parallel": False,
            "overwrite": True,
            **(profile if size.profiled and target == "Ascend" else {}),
            "context": {
                "device_target": target, "max_device_memory": "24GB", "enable_graph_kernel": False, "compile_cache": False,
            },
            "parallel": {"parallel_mode": "semi_auto_parallel", "enable_parallel_optimizer": False},
            "runner_config": {"batch_size": batch, "train_steps": size.steps},
            "runner_wrapper": {"scale_sense": 1.0, "use_clip_grad": True, "max_grad_norm": 1.0},
            "optimizer": {"type": "AdamW", "betas": [0.9, 0.95], "eps": 1.0e-4, "weight_decay": 0.1},
            "lr_schedule": {"type": "ConstantWarmUpLR", "learning_rate": 1.0e-3},
            "train_dataset": {"data_loader": {"config": {"data_path": str(corpus), "split": "100,0,0"}}},
            "callbacks": [{"type": "MetricsMonitor"}],
            "model": {"model_config": {**size.model, **(size.experts if experts else {})}},
        }
    )  # fmt: skip


def laid_out(base: RunConfig, keys: Keys) -> RunConfig:
    """Return a run under a layout; whatever has an axis of parallelism is a parallel run."""
    is_parallel = any(key.startswith("parallel_config.") for key in keys)
    return override_config(base, {**keys, **({"use_parallel": True} if is_parallel else {})})


def run_of(claim: Claim, shape: Shape, size: Size, target: Target, corpus: Path, output: Path) -> RunConfig:
    """Return the run that exercises a claim on such devices, without the checkpoint that it may resume."""
    return laid_out(base_run(size, target, claim.experts, corpus, output, shape.batch), claim.layout(shape))
