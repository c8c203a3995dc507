"""A run with less to compile and the same graph on one stage: other stages keep their last layer, where they had many.

A stage's graph depends on the others through the tensors they exchange only, and these have the same shape after every
layer; what layers add to the loss goes on through layers that add to it. The compiler, however, reads and differentiates
the layers of all stages before it cuts the pipeline. Layers that predict ahead are kept: they read the embedding of the
first stage.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from mindllm.config import RunConfig, keys_of_layers, override_config
from mindllm.parallel.layer_plan import make_plan
from mindllm.parallel.plan_text import render_plan

NUMBER = re.compile(r"(?<=\blayers-CellList/)\d+(?=-)|(?<=\blayers\.)\d+(?=\.)")


def own_stage_only(config: RunConfig, stage: int) -> tuple[RunConfig, Callable[[str], str]]:
    """Returns the smaller run, and what gives an operator's or parameter's name in it the layer number of the whole run."""
    plan, model = make_plan(config), config.model.config
    ahead = model.num_layers - 1  # layers that predict ahead are like the last one
    places = [(layer.chunk, layer.stage) for layer in plan.layers]
    kept = [
        number
        for number, place in enumerate(places)
        if place[1] == stage or number >= ahead or place != places[number + 1]
    ]
    smaller = replace(plan, layers=tuple(plan.layers[number] for number in kept))
    keys = keys_of_layers(model, [model.architecture.layers[number] for number in kept])
    values = {**{f"model.model_config.{key}": value for key, value in keys.items()}, **render_plan(smaller)}
    return override_config(config, values), lambda name: NUMBER.sub(lambda found: str(kept[int(found[0])]), name)
