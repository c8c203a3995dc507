"""What a sweep is: a run YAML, axes over any of its keys, and the points they make."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_core import PydanticCustomError

from mindllm.config import RunConfig, load_config, override_config, render_config
from mindllm.config.reading.load import read_file
from mindllm.config.reading.problems import plain_message
from mindllm.config.section import List, PositiveInt, Section
from mindllm.errors import UserError
from mindllm.files import SIZE_PATTERN, size_in_bytes
from mindllm.timing.device import DEFAULT

Mode = Literal["measure", "dry", "tune"]
Value = str | int | float | bool | None | list[Any] | dict[str, Any]
SWEEPS = Path(__file__).parents[1] / "sweeps"
CONFIGS = Path(__file__).parents[3]


class Sweep(Section):
    """The YAML of a sweep."""

    title: str = Field(description="Heading of its table.")
    description: str = Field(default="", description="What is compared, for the page of --markdown.")
    base: str = Field(
        description="The run YAML: a path from here or from the file, or one of those that come with mindllm."
    )
    mode: Mode = Field(
        description="measure: some steps on this machine; dry: memory by MindSpore's dry run, time by the model of step times; "
        "tune: the whole run, with losses and scores."
    )
    steps: PositiveInt = Field(default=10, description="measure: steps of a point.")
    warmup: PositiveInt = Field(default=3, description="Steps that figures of speed leave out.")
    device: str = Field(default=DEFAULT, description="dry: the device whose step time is predicted.")
    synthetic: bool = Field(default=False, description="Trains on random tokens, for runs whose text is not here.")
    max_memory: str | None = Field(
        default=None, pattern=SIZE_PATTERN, description="A point whose process takes more is out of memory."
    )
    timeout: PositiveInt = Field(default=3600, description="Seconds after which a point is given up.")
    fixed: dict[str, Value] = Field(default_factory=dict, description="Changes of every point, by dotted key.")
    axes: dict[str, list[Value] | dict[str, dict[str, Value]]] = Field(
        description="By dotted key a list of values; or by any name a mapping of labels to changes by dotted key."
    )
    columns: List[str] = Field(default=(), description="Figures of the table; none: those of the mode.")
    mean_over: str = Field(
        default="",
        description="An axis, such as seed, whose points are one row of the table: mean and standard deviation; empty: none.",
    )

    @field_validator("axes")
    @classmethod
    def _has_points(cls, axes: dict[str, Any]) -> dict[str, Any]:
        for name, values in axes.items():
            if not values:
                raise PydanticCustomError("empty_axis", "axis {name} has no value", {"name": name})
        if not axes:
            raise PydanticCustomError("no_axes", "needs at least one axis")
        return axes

    @model_validator(mode="after")
    def _mean_is_over_an_axis(self) -> Sweep:
        if self.mean_over and self.mean_over not in self.axes:
            raise PydanticCustomError(
                "mean_over",
                "mean_over names no axis (value {name}); axes: {axes}",
                {"name": self.mean_over, "axes": ", ".join(self.axes)},
            )
        if self.mean_over and len(self.axes) == 1:
            raise PydanticCustomError("mean_over", "mean_over needs an axis beside {name}", {"name": self.mean_over})
        return self

    @property
    def shown_axes(self) -> list[str]:
        """Axes that make rows of the table."""
        return [axis for axis in self.axes if axis != self.mean_over]

    @property
    def memory_limit(self) -> int | None:
        """Bytes."""
        return size_in_bytes(self.max_memory) if self.max_memory else None


@dataclass(frozen=True)
class Point:
    """One combination: ``labels`` by axis, ``changes`` by dotted key; ``config`` unless it is ``refused``, and why."""

    labels: Mapping[str, str]
    changes: Mapping[str, Any]
    config: RunConfig | None
    refused: str
    key: str

    def describe(self) -> str:
        """``seq_length 128, tuner LoRA``."""
        return ", ".join(f"{axis.rpartition('.')[2]} {label}" for axis, label in self.labels.items())


def read_sweep(path: Path) -> tuple[Sweep, Path]:
    """The sweep in a YAML, or one of those that come with it by its name; and the file it was read from.

    Raises UserError naming the keys that are wrong.
    """
    if not path.exists() and (SWEEPS / f"{path.name}.yaml").is_file():
        path = SWEEPS / f"{path.name}.yaml"
    content = read_file(path).data
    try:
        return Sweep.model_validate(content), path
    except ValidationError as error:
        lines = [
            f"{path}: {'.'.join(map(str, item['loc'])) or 'sweep'}: {plain_message(item)}" for item in error.errors()
        ]
        raise UserError("\n".join(lines)) from None


def points(sweep: Sweep, source: Path, synthetic: Mapping[str, Any] | None = None) -> Iterator[Point]:
    """Every combination of the axes, the last one changing fastest. ``synthetic``: what makes a run train on random tokens."""
    base = _base(sweep.base, source)
    ways = [_values(name, values) for name, values in sweep.axes.items()]
    for combination in itertools.product(*ways):
        labels = dict(zip(sweep.axes, (label for label, _ in combination), strict=True))
        changes: dict[str, Any] = {**(synthetic or {}), **sweep.fixed}
        for _, of_axis in combination:
            changes |= of_axis
        try:
            config, refused = load_config(base, {**changes, **_of_mode(sweep)}), ""
        except UserError as error:
            config, refused = None, str(error)
        yield Point(labels, changes, config, refused, _key(sweep, config, changes))


def _values(name: str, values: list[Value] | dict[str, dict[str, Value]]) -> list[tuple[str, dict[str, Value]]]:
    if isinstance(values, dict):
        return list(values.items())
    return [(value if isinstance(value, str) else json.dumps(value), {name: value}) for value in values]


def _base(text: str, source: Path) -> Path:
    found = [root / text for root in (Path(), source.parent, CONFIGS) if (root / text).is_file()]
    if not found:
        raise UserError(f"{source}: base: no such file (value {text}); write the path of a run's YAML")
    return found[0]


def _of_mode(sweep: Sweep) -> dict[str, Any]:
    """Changes that a mode makes of every run: what is measured is training, compiling included, and nothing is kept."""
    if sweep.mode == "dry":
        return {}
    own: dict[str, Any] = {"context.compile_cache": False, "overwrite": True}
    if sweep.mode == "measure":
        own |= {"do_eval": False, "callbacks": [{"type": "MetricsMonitor"}], "runner_config.train_steps": sweep.steps}
    return own


def in_directory(config: RunConfig, directory: Path) -> RunConfig:
    """The run with its files below ``directory``."""
    return override_config(config, {"output_dir": str(directory)})


def _key(sweep: Sweep, config: RunConfig | None, changes: Mapping[str, Any]) -> str:
    """A name for what is computed: the resolved configuration, how it is measured, and by which version."""
    what = render_config(config) if config is not None else json.dumps(dict(changes), sort_keys=True)
    how = [
        sweep.mode,
        sweep.steps,
        sweep.warmup,
        sweep.device if sweep.mode == "dry" else "",
        sweep.max_memory,
        _version(),
    ]
    return hashlib.sha256(json.dumps([what, how]).encode()).hexdigest()[:16]


def _version() -> str:
    try:
        return version("mindspore")
    except PackageNotFoundError:
        return ""
