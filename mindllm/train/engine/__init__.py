"""Engines execute the steps of a run. Start with ``engine``. The names below are imported on first use."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mindllm.train.engine.cluster_rank import ClusterRankEngine
    from mindllm.train.engine.engine import Batch, Engine, StepResult
    from mindllm.train.engine.replica import ReplicaEngine

MODULES = {
    "engine": ("Batch", "Engine", "StepResult"),
    "replica": ("ReplicaEngine",),
    "cluster_rank": ("ClusterRankEngine",),
}
__all__ = ["Batch", "ClusterRankEngine", "Engine", "ReplicaEngine", "StepResult"]


def __getattr__(name: str) -> Any:
    """Import the module that defines ``name``."""
    for module, names in MODULES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
