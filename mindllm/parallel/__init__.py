"""How a model lies on many devices: layouts, the sharding of every operator, the plan per layer, recomputation, stages.

Read in this order: ``layout``, ``sharding`` (one table), ``layer_plan``, ``recompute``, ``pipeline``, ``build``.
"""

from mindllm.parallel.build import ParallelModel, build_parallel_model, build_replica
from mindllm.parallel.context import mesh_of, set_parallel_context
from mindllm.parallel.layer_plan import LayerAssignment, LayerPlan, make_plan
from mindllm.parallel.layout import Mesh
from mindllm.parallel.plan_text import plan_lines, render_plan

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
