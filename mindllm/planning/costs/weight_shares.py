"""Which part of a backward pass are gradients of weights, by the model of time: compiled operators do not tell.

A schedule that puts gradients of weights off needs their time beside that of the whole backward pass, which small compiled stages
say. What the products of weights are of it on the device is taken from the architecture (``timing/step.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mindllm.architecture.layer_kind import LayerKind
from mindllm.config import RunConfig
from mindllm.parallel.layer_plan import LayerAssignment
from mindllm.reduced_runs.even import even_run
from mindllm.timing.configured import workload_of
from mindllm.timing.device import Device
from mindllm.timing.step import TimedWork
from mindllm.timing.step_work import Part, spec_part, step_work


@dataclass(frozen=True)
class WeightShares:
    """Shares of a backward pass without what is computed again, from 0 to 1: of the layers by name, of embedding and head."""

    layers: Mapping[str, float]
    head: float
    tail: float


def weight_shares(config: RunConfig, layers: Mapping[str, LayerKind], device: Device) -> WeightShares:
    """The shares in a run with these layers, on ``device``."""
    workload = workload_of(even_run(config))
    work = step_work(workload)
    timed = TimedWork(work, device)

    def share(part: Part) -> float:
        backward = timed.passes(part)[1].seconds
        return min(1.0, timed.weight_gradients(part) / backward) if backward else 0.0

    first = workload.architecture.layers[0]
    of_layers = {
        name: share(spec_part(workload, kind.spec or first, LayerAssignment(0))) for name, kind in layers.items()
    }
    return WeightShares(of_layers, share(work.parts["embedding"]), share(work.parts["head"]))
