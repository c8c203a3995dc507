"""This machine as a described device: small training runs on its CPU are measured, and the model of time is fitted to them.

It is the one device that everybody has. What is found wrong with the model here is wrong on others too.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mindllm.accept.measured import execute
from mindllm.accept.runs import Size, base_run, write_text
from mindllm.config import RunConfig, override_config
from mindllm.jobs.cores import cores
from mindllm.jobs.memory import available_bytes
from mindllm.terminal.progress import Progress, counted, unwatched
from mindllm.timing.configured import workload_of
from mindllm.timing.costs.work import HALVES
from mindllm.timing.device import Device
from mindllm.timing.measured.calibrate import Measured
from mindllm.units import GIB

STEPS = 8  # of a run; the first compiles, the median of the others counts
TRIES, APART = 12, 0.1  # seconds between tries: another program may have the cores for a while
PRODUCT, ARRAY = 1536, 1 << 25  # rows of a square matrix; numbers of an array far beyond any cache
DTYPE = "float32"
NOT_TOLD = ("overlap", "attention")
"""Constants of a device that runs of a CPU say nothing about: its processes exchange gradients behind the backward pass."""


@dataclass(frozen=True)
class Shape:
    """A small run.

    Attributes:
        name: for people.
        model: keys of ``model_config``.
        batch: sequences of a step.
        keys: further keys of the run, dotted.
    """

    name: str
    model: Mapping[str, Any]
    batch: int
    keys: Mapping[str, Any] = field(default_factory=dict)


def llama(hidden: int, layers: int, length: int, vocabulary: int = 4096, **keys: Any) -> dict[str, Any]:
    """Keys of a Llama with heads of 64 and a feed-forward of 8/3 of its width, in tiles of 32."""
    return {
        "vocab_size": vocabulary, "hidden_size": hidden, "num_layers": layers, "num_heads": max(1, hidden // 64),
        "n_kv_heads": max(1, hidden // 64), "intermediate_size": hidden * 8 // 3 // 32 * 32, "seq_length": length,
        "compute_dtype": DTYPE, **keys,
    }  # fmt: skip


TWO = {"use_parallel": True, "parallel_config.data_parallel": 2}
FITTED = (
    Shape("256 x 4, 2 x 256", llama(256, 4, 256), 2),
    Shape("512 x 2, 4 x 128", llama(512, 2, 128), 4),
    Shape("128 x 8, 4 x 128", llama(128, 8, 128), 4),
    Shape("256 x 2, 2 x 512", llama(256, 2, 512), 2),
    Shape("768 x 2, 2 x 64", llama(768, 2, 64), 2),
    Shape("64 x 4, 8 x 64", llama(64, 4, 64), 8),
    Shape("384 x 2, 1 x 1024", llama(384, 2, 1024, 1024), 1),
    Shape("256 x 2, 4 x 128, bfloat16", llama(256, 2, 128, compute_dtype="bfloat16"), 4),
    Shape("256 x 2, 4 x 128, float16", llama(256, 2, 128, compute_dtype="float16"), 4),
    Shape("256 x 4, 1 x 256 in each of two processes", llama(256, 4, 256), 1, TWO),
    Shape("768 x 2, 1 x 64 in each of two processes", llama(768, 2, 64), 1, TWO),
)
"""Width x layers, batch x length: products small and large, long sequences, many operators with little work, exchanges."""


def run_of(shape: Shape, directory: Path) -> RunConfig:
    """Return the run of a shape, whose text and output are below ``directory``."""
    size = Size(shape.model, {}, STEPS, 0, 0.0)
    directory.mkdir(parents=True, exist_ok=True)
    base = base_run(size, "CPU", False, write_text(directory, size), directory / "run")
    return override_config(base, {"runner_config.batch_size": shape.batch, **shape.keys})


def measure(shapes: Sequence[Shape], directory: Path, progress: Progress = unwatched) -> Iterator[Measured]:
    """Yield the measured step of each shape, trained in a process of its own.

    Raises:
        UserError, RunFailed: a run did not come to its end.
    """
    for number, shape in enumerate(counted(shapes, "small runs", progress)):
        config = run_of(shape, directory / str(number))
        seconds = execute(config).seconds
        assert seconds is not None, "more than one step was trained"
        yield Measured(shape.name, workload_of(config, on_cpu=True), seconds)


def described_here() -> Device:
    """Return this machine's CPU: what its products and its memory reach; what kernels reach of that is still assumed."""
    rng = np.random.default_rng(0)
    square, array = rng.random((PRODUCT, PRODUCT), np.float32), rng.random(ARRAY, np.float32)
    result = np.empty_like(array)
    peak = 2 * PRODUCT**3 / _least(lambda: square @ square)
    bandwidth = 3 * array.nbytes / _least(lambda: np.add(array, array, out=result))
    of_product = f"a product of {PRODUCT} rows in numpy, the fastest of {TRIES}"
    of_halves = f"{of_product}: MindSpore has no such product in half precision, and casts"
    of_array = f"the sum of two arrays of {array.nbytes >> 20} MB in numpy, the fastest of {TRIES}"

    def figure(value: float, source: str) -> dict[str, Any]:
        return {"value": value, "source": f"measured: {source}"}

    def assumed(value: float) -> dict[str, Any]:
        return {"value": value, "source": "assumed"}

    return Device.model_validate(
        {
            "name": platform.processor() or platform.machine() or "this machine",
            "software": "cpu",
            "memory_size": figure(float(available_bytes() or GIB), "what is free"),
            "cores": cores(),
            "matrix_flops": {DTYPE: figure(peak, of_product), **{dtype: figure(peak, of_halves) for dtype in HALVES}},
            "vector_flops": figure(peak, of_product),
            "memory_bandwidth": figure(bandwidth, of_array),
            "links": [
                {
                    "name": "processes", "devices": None, "topology": "switch", "bandwidth": assumed(1e9),
                    "efficiency": assumed(1.0), "latency": assumed(1e-3),
                }
            ],
            "efficiency": {
                "matrix": assumed(0.6), "half_size": assumed(64.0), "attention": assumed(0.5), "vector": assumed(1.0),
                "memory": assumed(0.6), "float16_casts": assumed(0.2), "bfloat16_casts": assumed(0.2),
                "launch": assumed(3e-5), "host": {"value": 0, "source": "kernels run on the host"},
            },
            "overlap": {"value": 1e-3, "source": "gradients are exchanged behind the backward pass"},
            "step_overhead": assumed(4e-3),
        }
    )  # fmt: skip


def _least(work: Callable[[], Any]) -> float:
    """Seconds of the fastest try."""
    found = []
    for _ in range(TRIES):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
        time.sleep(APART)
    return min(found)
