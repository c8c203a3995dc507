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
    """The pipeline of a command line; None keeps the value of the file.

    Attributes:
        limit_mb: memory of every stage.
    """

    stages: int | None = None
    chunks: int | None = None
    micro_batches: int | None = None
    schedule: str | None = None
    limit_mb: float | None = None

    def fields(self) -> dict[str, Any]:
        """Return the values that are set."""
        return {key: value for key, value in vars(self).items() if value is not None}


def read_problem(path: Path, setting: Setting | None = None, instance: str | None = None) -> Problem:
    """Return the problem of a file in any form; ``instance`` picks one of a file with several.

    Raises:
        UserError: the file is missing or not JSON, its form is unknown, or a value is invalid; names the file and the key.
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
        message = f"--instance {name}: no such instance" if name else "holds several; choose one with --instance NAME"
        raise UserError(f"{path}: {message}{nearest(name or '', by_name)}")
    return by_name[name]


def instance_fields(instance: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return the fields of an instance with dense and MoE layers, kinds none and full, and a head on the last stage.

    Its limits exclude static memory; on the last stage only the memory of the head is static.
    """
    time, memory, stages = instance["time"], instance["memory_mb"], instance["pipeline_stage"]
    if stages < 2:
        raise UserError(f"{source}: pipeline_stage: such an instance has a first and a last stage (value {stages})")
    ratio = time["backward_over_forward"]
    layers = []
    for name, count in instance["layers"].items():
        forward = time["forward"][name]
        kinds = {"none": {"backward": ratio * forward, "activation_mb": memory["activation_none"][name]}}
        if "full" in instance["recompute_kinds"]:
            again = (ratio + time["full_recompute_over_forward"]) * forward
            kinds["full"] = {"backward": again, "activation_mb": memory["activation_full"][name]}
        parameter = memory["parameter"][name]
        layers.append({"name": name, "count": count, "forward": forward, "parameter_mb": parameter, "kinds": kinds})
    head = time["lm_head_forward"]
    static = [memory["static_stage0"], *[memory["static_other_stages"]] * (stages - 1)]
    limits = [memory["limit_stage0"], *[memory["limit_middle"]] * (stages - 2), memory["limit_last"]]
    static[-1] = memory["lm_head"]
    return {
        "name": instance["name"],
        "stages": stages,
        "chunks": instance["pp_interleave_num"],
        "micro_batches": instance["micro_batch_num"],
        "layers": layers,
        "tail": {"forward": head, "backward": ratio * head},
        "static_mb": static,
        "limit_mb": [limit + fixed for limit, fixed in zip(limits, static, strict=True)],
    }


def layer_file_fields(content: Mapping[str, Any], setting: Setting, source: str) -> dict[str, Any]:
    """Return the fields of a layer file; stages, micro-batches and the limit come from the command line."""
    for key, option in (("stages", "--stages"), ("micro_batches", "--micro_batches")):
        if getattr(setting, key) is None:
            raise UserError(f"{source}: is a layer file, which does not say it: give {option}")
    fields: dict[str, list[Mapping[str, Any]]] = {"HEAD": [], "BODY": [], "TAIL": []}
    for layer in content["layers_description"]:
        kind = layer["type"]
        if kind not in fields:
            raise UserError(f"{source}: layers_description: type {kind}{nearest(kind, fields)}")
        fields[kind].append(layer)
    counts = content.get("auto_partition_layer", {})
    return {
        "name": content.get("name", "layers"),
        "layers": [_body(layer, counts, source) for layer in fields["BODY"]],
        "head": _end(fields["HEAD"]),
        "tail": _end(fields["TAIL"]),
        "static_mb": content.get("stage_const_mem") or 0,
    }


def _body(layer: Mapping[str, Any], counts: Mapping[str, int], source: str) -> dict[str, Any]:
    name, listed, layer_number = layer["name"], counts.get(layer["name"]), layer.get("nb_layer")
    if listed is not None and layer_number is not None and listed != layer_number:
        raise UserError(
            f"{source}: layer {name}: auto_partition_layer has {shortened(listed)} layers, nb_layer {shortened(layer_number)}; "
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
        "count": next((number for number in (listed, layer_number) if number is not None), 1),
        "forward": forward,
        "parameter_mb": layer.get("memory_parameter") or 0,
        "kinds": kinds,
    }


def _backward(layer: Mapping[str, Any], kind: str, surcharge: float) -> float:
    """Return the backward time with recomputation: measured for all kinds or for this one, else twice the forward pass."""
    measured = layer.get("backward_time", {})
    if isinstance(measured, Mapping):
        return measured.get(kind.upper(), 2 * layer["time"] * (1 + surcharge))
    return measured * (1 + surcharge)


def _end(layers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    times = sum(layer["time"] for layer in layers)
    memory = sum(layer.get("memory_parameter") or 0 for layer in layers)
    return {"forward": times, "backward": 2 * times, "memory_mb": memory}
