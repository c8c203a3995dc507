"""Problems in the forms they come in: our own JSON, instances of mixture-of-experts models, and the layer files of SAPP.

SAPP (MindSpore's public planner) describes a model by a JSON of layers: HEAD, BODY and TAIL with a time, memories by recompute
kind, and coefficients of the backward pass. Its readers find the same meaning here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindllm.errors import UserError, nearest
from mindllm.planning.problem import Problem, make_problem, read_json, shortened

KINDS = {
    "none": ("memory_activation", "backward_coef", 0.0),
    "select": ("memory_select_rec", "select_rec_coef", 0.04),
    "comm": ("memory_select_comm", "select_comm_coef", 0.125),
    "both": ("memory_both_comm_select", "both_comm_select_coef", 0.165),
    "full": ("memory_recompute", "recompute_coef", 0.5),
}
"""SAPP's key of the memory and of the backward surcharge of each recompute kind, and its default surcharge."""


@dataclass(frozen=True)
class Setting:
    """What a command line says of a pipeline; None leaves what the file says.

    Attributes:
        limit_mb: memory of every stage.
    """

    stages: int | None = None
    chunks: int | None = None
    micro_batches: int | None = None
    schedule: str | None = None
    limit_mb: float | None = None

    def fields(self) -> dict[str, Any]:
        """What is given."""
        return {key: value for key, value in vars(self).items() if value is not None}


def read_problem(path: Path, setting: Setting | None = None, instance: str | None = None) -> Problem:
    """Reads a problem of any form; ``instance`` picks one of a file that holds several.

    Raises:
        UserError: no such file, no JSON, none of the forms, or a value that makes no sense; names the file and the key.
    """
    setting = setting or Setting()
    content = read_json(path)
    if not isinstance(content, Mapping):
        raise UserError(f"{path}: must hold an object, not {type(content).__name__}")
    if "instances" in content:
        content = _pick(content["instances"], path, instance)
    elif instance is not None:
        raise UserError(f"{path}: holds one problem, so --instance {instance} picks nothing")
    try:
        if "layers_description" in content:
            fields = layer_file_fields(content, setting, str(path))
        elif "pipeline_stage" in content:
            fields = instance_fields(content, str(path))
        else:
            fields = dict(content)
    except KeyError as error:
        raise UserError(f"{path}: needs the key {error}") from None
    except (TypeError, AttributeError, OverflowError) as error:
        raise UserError(f"{path}: a value has a form that cannot be read: {error}") from None
    return make_problem({**fields, **setting.fields()}, str(path))


def _pick(instances: Any, path: Path, name: str | None) -> Mapping[str, Any]:
    if not isinstance(instances, list) or not all(
        isinstance(entry, dict) and isinstance(entry.get("name"), str) for entry in instances
    ):
        raise UserError(f"{path}: instances: must be a list of objects with a name, which is a text")
    by_name = {entry["name"]: entry for entry in instances}
    if name is None and len(by_name) == 1:
        return next(iter(by_name.values()))
    if name not in by_name:
        given = f"--instance {name}: no such instance" if name else "holds several; choose one with --instance NAME"
        raise UserError(f"{path}: {given}{nearest(name or '', by_name)}")
    return by_name[name]


def instance_fields(given: Mapping[str, Any], source: str) -> dict[str, Any]:
    """An instance with dense and mixture-of-experts layers, kinds none and full, and a head on the last stage.

    Its limits are what static memory leaves; on the last stage the head's memory is all that is static.
    """
    time, memory, stages = given["time"], given["memory_mb"], given["pipeline_stage"]
    if stages < 2:
        raise UserError(f"{source}: pipeline_stage: such an instance has a first and a last stage (value {stages})")
    ratio = time["backward_over_forward"]
    layers = []
    for name, count in given["layers"].items():
        forward = time["forward"][name]
        kinds = {"none": {"backward": ratio * forward, "activation_mb": memory["activation_none"][name]}}
        if "full" in given["recompute_kinds"]:
            again = (ratio + time["full_recompute_over_forward"]) * forward
            kinds["full"] = {"backward": again, "activation_mb": memory["activation_full"][name]}
        parameter = memory["parameter"][name]
        layers.append({"name": name, "count": count, "forward": forward, "parameter_mb": parameter, "kinds": kinds})
    head = time["lm_head_forward"]
    static = [memory["static_stage0"], *[memory["static_other_stages"]] * (stages - 1)]
    limits = [memory["limit_stage0"], *[memory["limit_middle"]] * (stages - 2), memory["limit_last"]]
    static[-1] = memory["lm_head"]
    return {
        "name": given["name"],
        "stages": stages,
        "chunks": given["pp_interleave_num"],
        "micro_batches": given["micro_batch_num"],
        "layers": layers,
        "tail": {"forward": head, "backward": ratio * head},
        "static_mb": static,
        "limit_mb": [limit + fixed for limit, fixed in zip(limits, static, strict=True)],
    }


def layer_file_fields(given: Mapping[str, Any], setting: Setting, source: str) -> dict[str, Any]:
    """A layer file; stages, micro-batches and the limit come from the command line."""
    for key, option in (("stages", "--stages"), ("micro_batches", "--micro_batches")):
        if getattr(setting, key) is None:
            raise UserError(f"{source}: is a layer file, which does not say it: give {option}")
    found: dict[str, list[Mapping[str, Any]]] = {"HEAD": [], "BODY": [], "TAIL": []}
    for layer in given["layers_description"]:
        kind = layer["type"]
        if kind not in found:
            raise UserError(f"{source}: layers_description: type {kind}{nearest(kind, found)}")
        found[kind].append(layer)
    counts = given.get("auto_partition_layer", {})
    return {
        "name": given.get("name", "layers"),
        "layers": [_body(layer, counts, source) for layer in found["BODY"]],
        "head": _end(found["HEAD"]),
        "tail": _end(found["TAIL"]),
        "static_mb": given.get("stage_const_mem") or 0,
    }


def _body(layer: Mapping[str, Any], counts: Mapping[str, int], source: str) -> dict[str, Any]:
    name, listed, own = layer["name"], counts.get(layer["name"]), layer.get("nb_layer")
    if listed is not None and own is not None and listed != own:
        raise UserError(
            f"{source}: layer {name}: auto_partition_layer says {shortened(listed)} layers, nb_layer {shortened(own)}; "
            "SAPP takes nb_layer: write the same number in both, or leave one out"
        )
    forward = layer.get("forward_time", layer["time"])
    kinds = {}
    for name, (memory, coefficient, default) in KINDS.items():
        if layer.get(memory) is not None:
            surcharge = layer.get(coefficient, default)
            kinds[name] = {"backward": _backward(layer, name, surcharge), "activation_mb": layer[memory]}
    return {
        "name": layer["name"],
        "count": next((number for number in (listed, own) if number is not None), 1),
        "forward": forward,
        "parameter_mb": layer.get("memory_parameter") or 0,
        "kinds": kinds,
    }


def _backward(layer: Mapping[str, Any], kind: str, surcharge: float) -> float:
    """Measured, for all kinds or for this one, or twice the forward pass; with what is computed again."""
    measured = layer.get("backward_time", {})
    if isinstance(measured, Mapping):
        return measured.get(kind.upper(), 2 * layer["time"] * (1 + surcharge))
    return measured * (1 + surcharge)


def _end(layers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    times = sum(layer["time"] for layer in layers)
    memory = sum(layer.get("memory_parameter") or 0 for layer in layers)
    return {"forward": times, "backward": 2 * times, "memory_mb": memory}
