"""A run with less to compile and the same graph on one stage: other stages keep a single layer, where they had many.

A stage's graph depends on the others through the tensors they exchange only, and these have the same shape after every
layer. The compiler, however, reads and differentiates the layers of all stages before it cuts the pipeline. Layers that
predict ahead are kept: they read the embedding of the first stage.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from mindllm.config import RunConfig, keys_of_layers, override_config
from mindllm.parallel.layer_plan import LayerAssignment, make_plan
from mindllm.parallel.plan_text import render_plan

NUMBER = re.compile(r"(?<=\blayers-CellList/)\d+(?=-)|(?<=\blayers\.)\d+(?=\.)")


def own_stage_only(config: RunConfig, stage: int) -> tuple[RunConfig, Callable[[str], str]]:
    """Returns the smaller run, and what gives an operator's or parameter's name in it the layer number of the whole run."""
    plan, model = make_plan(config), config.model.config
    ahead = model.num_layers - 1 if model.num_nextn_predict_layers else model.num_layers  # like the layer before them
    kept = [
        number
        for number, layer in enumerate(plan.layers)
        if layer.stage == stage or number == 0 or number >= ahead or _place(layer) != _place(plan.layers[number - 1])
    ]
    smaller = replace(plan, layers=tuple(plan.layers[number] for number in kept))
    keys = keys_of_layers(model, [model.architecture.layers[number] for number in kept])
    values = {**{f"model.model_config.{key}": value for key, value in keys.items()}, **render_plan(smaller)}
    return override_config(config, values), lambda name: NUMBER.sub(lambda found: str(kept[int(found[0])]), name)


def _place(layer: LayerAssignment) -> tuple[int, int]:
    return layer.chunk, layer.stage
