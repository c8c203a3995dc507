"""Engines: what executes the steps of a run. Read ``engine`` first; the names below are found when they are first used."""

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
    """Imports the module that has ``name``."""
    for module, names in MODULES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
