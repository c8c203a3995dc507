"""Whether the plan of all layers of a run, of which the graphs of a smaller model have a few, is what its YAML says."""

from __future__ import annotations

from mindllm.compiled.conformance.expected import AskedLayer, asked_plan
from mindllm.compiled.conformance.finding import Finding
from mindllm.config import RunConfig
from mindllm.parallel.layer_plan import LayerAssignment, make_plan


def planned(config: RunConfig) -> Finding | None:
    """The plan that a run is built by, layer by layer, against the reading of its keys; None where nothing is to be planned."""
    asked, plan = asked_plan(config).layers, make_plan(config).layers
    if not any(layer.stage or layer.recompute or any(layer.patterns.values()) for layer in asked):
        return None
    problems = [] if len(asked) == len(plan) else [f"{len(plan)} layers are planned, not {len(asked)}"]
    problems += [
        f"layer {number} is planned {_text(has)}, the YAML has it {_text(wanted)}"
        for number, (wanted, has) in enumerate(zip(asked, plan, strict=False))
        if _text(wanted) != _text(has)
    ]
    found = f"{len(problems)} otherwise" if problems else "all of them"
    return Finding("plan of the run", f"{len(asked)} layers", found, tuple(problems))


def _text(layer: AskedLayer | LayerAssignment) -> str:
    """``on stage 1, chunk 0, recomputed``, and the patterns by key."""
    words = [f"on stage {layer.stage}", f"chunk {layer.chunk}"]
    words += ["recomputed"] * layer.recompute
    words += [f"{key} of {', '.join(sorted(names))}" for key, names in sorted(layer.patterns.items()) if names]
    return ", ".join(words)
