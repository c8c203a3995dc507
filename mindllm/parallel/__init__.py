"""How a model lies on many devices: layouts, the sharding of every operator, the plan per layer, recomputation, stages.

Read in this order: ``layout``, ``sharding`` (one table), ``layer_plan``, ``recompute``, ``pipeline``, ``build``. The names below
are found when they are first used: plans and layouts are read without importing MindSpore.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mindllm.parallel.build import ParallelModel, build_parallel_model, build_replica
    from mindllm.parallel.context import set_parallel_context
    from mindllm.parallel.layer_plan import LayerAssignment, LayerPlan, make_plan
    from mindllm.parallel.layout import Mesh, mesh_of
    from mindllm.parallel.plan_text import plan_lines, render_plan

MODULES = {
    "build": ("ParallelModel", "build_parallel_model", "build_replica"),
    "context": ("set_parallel_context",),
    "layer_plan": ("LayerAssignment", "LayerPlan", "make_plan"),
    "layout": ("Mesh", "mesh_of"),
    "plan_text": ("plan_lines", "render_plan"),
}
__all__ = [
    "LayerAssignment",
    "LayerPlan",
    "Mesh",
    "ParallelModel",
    "build_parallel_model",
    "build_replica",
    "make_plan",
    "mesh_of",
    "plan_lines",
    "render_plan",
    "set_parallel_context",
]


def __getattr__(name: str) -> Any:
    """Imports the module that has ``name``."""
    for module, names in MODULES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
