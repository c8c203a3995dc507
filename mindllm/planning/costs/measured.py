"""Costs fitted to measurements on a cluster: the init YAML of SAPP, MindSpore's public planner, and its layer files.

Peak memories of the stages of one or several runs give, in one weighted least squares, the memory of a layer's parameters, of its
activations under each recompute kind, of head and tail, and what every stage has in common:

    M_i = n_i parameter + alive_i sum_r n_ir activation_r + constant (+ head on the first stage, + tail on the last)

With two stages each has an end, so the constant is part of head and tail. Residuals are shown, and the largest one is a margin
on all stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import nnls

from mindllm.config.reading.yaml_tree import read_mapping
from mindllm.errors import UserError
from mindllm.planning.problem import STANDARD_KINDS, Problem, make_problem, read_json
from mindllm.planning.read_problem import KINDS, Setting, layer_file_fields
from mindllm.planning.yaml_plan import read_yaml_plan
from mindllm.schedules.orders import alive, stage_orders


@dataclass(frozen=True)
class Run:
    """Measured memory of one run.

    Attributes:
        memory_mb: peak of every stage, ``[stages]``.
        kinds: layers of each stage by recompute kind, ``[stages, kinds]``.
        alive: micro-batches held by each stage, ``[stages]``.
    """

    source: str
    memory_mb: np.ndarray
    kinds: np.ndarray
    alive: np.ndarray
    times: Mapping[str, float]


@dataclass(frozen=True)
class Fit:
    """Unknowns by name in MB, and measured minus fitted memory of every stage of every run."""

    values: Mapping[str, float]
    residuals: tuple[tuple[str, np.ndarray], ...]

    @property
    def margin_mb(self) -> float:
        """The largest memory of a stage beyond the fit."""
        return max(0.0, max(float(residual.max()) for _, residual in self.residuals))


def read_measured(paths: Sequence[Path], setting: Setting) -> tuple[Problem, Fit | None]:
    """Return the problem of a layer file, of init YAMLs, or of both: then the file has times and the YAMLs memory."""
    layer_files = [path for path in paths if path.suffix == ".json"]
    if len(layer_files) > 1:
        raise UserError(f"{layer_files[1]}: one layer file is enough; {layer_files[0]} is another")
    runs = [read_run(path, setting.micro_batches) for path in paths if path.suffix != ".json"]
    if not runs:
        content = read_json(layer_files[0])
        if not isinstance(content, Mapping) or "layers_description" not in content:
            raise UserError(f"{layer_files[0]}: not a layer file: layers_description is missing")
        fields = layer_file_fields(content, setting, str(layer_files[0]))
        return make_problem({**fields, **setting.fields()}, str(layer_files[0])), None
    fit = fit_memory(runs)
    stages = setting.stages or len(runs[0].memory_mb)
    setting = Setting(**{**vars(setting), "stages": stages})
    if setting.micro_batches is None:
        raise UserError(f"{paths[0]}: does not say how many micro-batches a step has: give --micro_batches")
    fields = _fields(read_json(layer_files[0]) if layer_files else None, runs, fit, setting, str(paths[0]))
    return make_problem({**fields, **setting.fields()}, str(paths[0])), fit


def read_run(path: Path, micro_batches: int | None) -> Run:
    """Return the measured memory of an init YAML; UserError names a missing or invalid key."""
    content = read_mapping(path)
    pipeline, usage = _section(content, "pipeline_config", path), _section(content, "memory_usage", path)
    stages, layers = _positive(pipeline, "pipeline_num", path), _positive(pipeline, "num_layer", path)
    if "profiling_config" in content and "time_config" not in content:
        raise UserError(f"{path}: profiling_config: traces are not read; write time_config with head, body and tail")
    cost = {"backward": 0.0, "activation_mb": 0.0}
    shape = make_problem(
        {
            "stages": stages,
            "micro_batches": micro_batches or stages,
            "layers": [{"name": "body", "count": layers, "forward": 0, "kinds": dict.fromkeys(KINDS, cost)}],
        },
        str(path),
    )
    recompute = content.get("recompute_config") or {}
    plan = read_yaml_plan(shape, {"offset": pipeline.get("offset", 0), **recompute}, str(path))
    kinds = np.array([[names.count(kind) for kind in KINDS] for names in plan.places])
    orders = stage_orders("1f1b", stages, 1, max(stages, micro_batches or stages))
    micro_batches_alive = np.array([vectors.max() for vectors in alive(orders, 1)])
    times = content.get("time_config") or {}
    return Run(
        str(path),
        _memories(usage, stages, path),
        kinds,
        micro_batches_alive,
        {k: _number(times, k, path) for k in times},
    )


def _memories(usage: Mapping[str, Any], stages: int, path: Path) -> np.ndarray:
    """Return the peaks of all stages from head, tail and body memories."""
    body = _section(usage, "body_memories", path)
    numbers, values = body.get("stage_id"), body.get("memories")
    if not isinstance(numbers, list) or not isinstance(values, list) or len(numbers) != len(values):
        raise UserError(f"{path}: memory_usage.body_memories: stage_id and memories must be lists of one length")
    peaks = np.full(stages, np.nan)
    peaks[0], peaks[-1] = _number(usage, "head_memory", path), _number(usage, "tail_memory", path)
    for number, value in zip(numbers, values, strict=True):
        if not isinstance(number, int) or not 0 <= number < stages:
            raise UserError(f"{path}: memory_usage.body_memories.stage_id: invalid stage {number} of {stages} stages")
        peaks[number] = _number({"memories": value}, "memories", path)
    return peaks


def fit_memory(runs: Sequence[Run]) -> Fit:
    """Fit all stages of all runs by one least squares, weighted by their measured memory; no memory is negative.

    Raises:
        UserError: the runs do not determine every unknown.
    """
    used = [index for index in range(len(KINDS)) if any(run.kinds[:, index].any() for run in runs)]
    names = ["parameter", *(list(KINDS)[index] for index in used), "head", "tail"]
    if any(len(run.memory_mb) > 2 for run in runs):
        names.append("constant")
    blocks = []
    for run in runs:
        stages = len(run.memory_mb)
        ends = np.zeros((stages, 2))
        ends[0, 0] = ends[-1, 1] = 1
        columns = [run.kinds.sum(axis=1), *(run.kinds[:, index] * run.alive for index in used), *ends.T]
        blocks.append(np.column_stack([*columns, np.ones(stages)][: len(names)]))
    matrix, memory = np.vstack(blocks).astype(float), np.concatenate([run.memory_mb for run in runs])
    is_measured = np.isfinite(memory)
    weighted = matrix[is_measured] / memory[is_measured, None]
    scale = np.linalg.norm(weighted, axis=0)
    _, sizes, directions = np.linalg.svd(weighted / scale)
    rank = int((sizes > 1e-9 * sizes[0]).sum())
    if rank < len(names):
        free = np.abs(directions[rank:]).max(axis=0) > 1e-6
        unclear = [name for name, loose in zip(names, free, strict=True) if loose]
        raise UserError(
            f"{runs[0].source}: {int(is_measured.sum())} measured stages do not determine {', '.join(unclear)}; add a run "
            f"with other offsets and recompute counts (--measured takes several files)"
        )
    values = nnls(weighted / scale, np.ones(int(is_measured.sum())))[0] / scale
    residuals, start = [], 0
    for run in runs:
        stop = start + len(run.memory_mb)
        residuals.append((run.source, np.nan_to_num(memory[start:stop] - matrix[start:stop] @ values)))
        start = stop
    return Fit(dict(zip(names, values.tolist(), strict=True)), tuple(residuals))


def _fields(layers: Any, runs: Sequence[Run], fit: Fit, setting: Setting, source: str) -> dict[str, Any]:
    """Return the fields of the problem with fitted memory and measured times."""
    if layers is not None:
        fields = layer_file_fields(layers, setting, source)
        if len(fields["layers"]) != 1:
            raise UserError(
                f"{source}: stage memories are shared out over one kind of layers, not {len(fields['layers'])}"
            )
        body = fields["layers"][0]
        backward = {name: cost["backward"] for name, cost in body["kinds"].items()}
    else:
        times = next((run.times for run in runs if run.times), None)
        if times is None or not {"head", "body", "tail"} <= set(times):
            raise UserError(f"{source}: time_config: must hold head, body and tail")
        ends = {name: {"forward": times[name], "backward": 2 * times[name]} for name in ("head", "tail")}
        body = {"name": "body", "count": int(runs[0].kinds.sum()), "forward": times["body"]}
        fields = {"name": Path(source).stem, "layers": [body], **ends}
        backward = {name: 2 * times["body"] * (1 + surcharge) for name, (_, _, surcharge) in KINDS.items()}
    kinds = {
        name: {"backward": backward[name], "activation_mb": fit.values[name]}
        for name in STANDARD_KINDS
        if name in fit.values and name in backward
    }
    body.update(parameter_mb=fit.values["parameter"], kinds=kinds)
    for name in ("head", "tail"):
        fields[name] = {**fields[name], "memory_mb": fit.values[name]}
    return {**fields, "static_mb": fit.values.get("constant", 0.0) + fit.margin_mb}


def _section(content: Mapping[str, Any], key: str, path: Path) -> Mapping[str, Any]:
    if not isinstance(content.get(key), Mapping):
        raise UserError(f"{path}: {key}: must be a mapping (is {content.get(key)!r})")
    return content[key]


def _positive(content: Mapping[str, Any], key: str, path: Path) -> int:
    value = content.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(f"{path}: {key}: must be a whole number above 0 (is {value!r})")
    return value


def _number(content: Mapping[str, Any], key: str, path: Path) -> float:
    value = content.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise UserError(f"{path}: {key}: must be a number that is not negative (is {value!r})")
    return float(value)
