"""The points of a sweep, one after the other: each its own process and a line of ``results.jsonl``, which is not repeated."""

from __future__ import annotations

import json
import logging
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mindllm.config import render_config
from mindllm.data.indexed import IndexedWriter, smallest_dtype
from mindllm.errors import RunFailed
from mindllm.files import atomic_open
from mindllm.outside import parse_json
from toolkit.benchmark.report import machine
from toolkit.benchmark.sweep.figures import METRICS, left_out, of_dry_run, of_run, of_size, of_step_time
from toolkit.benchmark.sweep.plan import Point, Sweep, in_directory
from toolkit.benchmark.sweep.process import Ended, watched

RESULTS = "results.jsonl"
OK, REFUSED, OUT_OF_MEMORY, TIMED_OUT, FAILED = "ok", "refused", "out of memory", "timed out", "failed"
DOES_NOT_FIT = 3  # the dry run's exit code
SYNTHETIC_TOKENS, SYNTHETIC_DOCUMENTS, SMALLEST_VOCABULARY = 400_000, 40, 64
TRAIN = (sys.executable, "-c", "from mindllm.cli.run import command; command()")
Result = dict[str, Any]
logger = logging.getLogger(__name__)


def read_results(directory: Path) -> dict[str, Result]:
    """Lines of earlier starts by the key of their configuration; a last one that was not written to its end is left out."""
    path = directory / RESULTS
    found: dict[str, Result] = {}
    for line in path.read_bytes().splitlines(keepends=True) if path.is_file() else ():
        if not line.endswith(b"\n"):
            break
        result = parse_json(line)
        found[result["key"]] = result
    return found


def run_sweep(
    sweep: Sweep, points: Sequence[Point], directory: Path, say: Callable[[str], None], again: Sequence[str] = ()
) -> list[Result]:
    """Results of all points in their order. Those with a status of ``again`` are run once more."""
    directory.mkdir(parents=True, exist_ok=True)
    tried = (*again, REFUSED)  # what was refused may be there by now, such as a checkpoint
    known = {key: result for key, result in read_results(directory).items() if result["status"] not in tried}
    _write(directory, known.values())  # without a torn line and without what is run again
    results = []
    for number, point in enumerate(points, start=1):
        if point.key not in known:
            say(f"{number} of {len(points)}: {point.describe()}")
            start = time.monotonic()
            known[point.key] = _result(sweep, point, directory)
            ended, why = known[point.key]["status"], known[point.key]["why"].partition("\n")[0]
            say(f"  {ended} after {time.monotonic() - start:.0f} s{': ' * bool(why)}{why}")
            with open(directory / RESULTS, "a", encoding="utf-8") as file:
                file.write(json.dumps(known[point.key]) + "\n")
        results.append({**known[point.key], "labels": dict(point.labels)})
    return results


def _write(directory: Path, results: Any) -> None:
    with atomic_open(directory / RESULTS) as file:
        file.writelines(json.dumps(result) + "\n" for result in results)


def _result(sweep: Sweep, point: Point, directory: Path) -> Result:
    about = {"key": point.key, "labels": dict(point.labels), "mode": sweep.mode, "changes": dict(point.changes)}
    if point.config is None:
        return {**about, "status": REFUSED, "why": point.refused, "figures": {}}
    place = directory / "points" / point.key
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    config = in_directory(point.config, place / "run")
    (place / "config.yaml").write_text(render_config(config), encoding="utf-8")
    figures: dict[str, Any] = of_size(config)
    try:
        status, why, found = _dry(sweep, place) if sweep.mode == "dry" else _trained(sweep, place)
    except (RunFailed, OSError, ValueError, KeyError) as error:
        status, why, found = FAILED, str(error), {}
    for kept in ("checkpoint", "compile_cache"):
        shutil.rmtree(place / "run" / kept, ignore_errors=True)
    where = {"config": str(place / "config.yaml"), "machine": machine()}
    return {**about, "status": status, "why": why, "figures": {**figures, **found}, **where}


def _trained(sweep: Sweep, place: Path) -> tuple[str, str, Mapping[str, Any]]:
    command = [*TRAIN, "--config", str(place / "config.yaml")]
    metrics = place / "run" / METRICS
    ended = watched(command, place, sweep.memory_limit, sweep.timeout, begun=metrics)
    peak: dict[str, Any] = {"peak_memory_mb": round(ended.peak_bytes / 2**20)}
    if ended.later_bytes:
        peak["step_memory_mb"] = round(ended.later_bytes / 2**20)
    if problem := _problem(ended):
        return *problem, peak
    return OK, "", {**of_run(place / "run", sweep.warmup, sweep.mode == "tune"), **peak}


def _dry(sweep: Sweep, place: Path) -> tuple[str, str, Mapping[str, Any]]:
    """Memory and time; what does not fit a device has a row with both."""
    config = ["--config", str(place / "config.yaml"), "--json"]
    figures: dict[str, Any] = {}
    tool = [sys.executable, "-m", "mindllm.main", "time", *config, "--device", sweep.device]
    ended = watched(tool, place / "step_time", sweep.memory_limit, sweep.timeout)
    if problem := _problem(ended):
        return *problem, figures
    figures |= of_step_time(ended.output)
    why = left_out(ended.output)
    tool = [sys.executable, "-m", "toolkit.dry_run", *config, "--output", str(place / "dry_run")]
    ended = watched(tool, place / "memory", sweep.memory_limit, sweep.timeout)
    if ended.code == DOES_NOT_FIT:
        return OUT_OF_MEMORY, "does not fit the device", {**figures, **of_dry_run(ended.output)}
    if problem := _problem(ended):
        return *problem, figures
    return OK, why, {**figures, **of_dry_run(ended.output)}


def _problem(ended: Ended) -> tuple[str, str] | None:
    """Status and reason of a process that did not come to a good end."""
    if ended.code == 0:
        return None
    said = [line for line in ended.errors.splitlines() if line.startswith("error: ")] or ended.errors.splitlines()[-1:]
    why = said[0].removeprefix("error: ") if said else f"ended with {ended.code}"
    if ended.over == "time":
        return TIMED_OUT, "was given up after the seconds of timeout"
    if ended.out_of_memory:
        return OUT_OF_MEMORY, "took more than max_memory" if ended.over == "memory" else why
    return (REFUSED if ended.code == 2 else FAILED), why


def synthetic_text(directory: Path) -> dict[str, Any]:
    """Writes random tokens that any model knows, once; returns the changes of a run that trains on them."""
    prefix = directory / "synthetic" / "corpus"
    if not prefix.with_suffix(".idx").is_file():
        prefix.parent.mkdir(parents=True, exist_ok=True)
        random = np.random.default_rng(0)
        with IndexedWriter(prefix, smallest_dtype(SMALLEST_VOCABULARY)) as writer:
            for _ in range(SYNTHETIC_DOCUMENTS):
                writer.append(random.integers(0, SMALLEST_VOCABULARY, SYNTHETIC_TOKENS // SYNTHETIC_DOCUMENTS))
                writer.end_document()
    loader = {"type": "BlendedMegatronDatasetDataLoader", "config": {"data_path": str(prefix), "split": "9,1"}}
    return {"train_dataset": {"data_loader": loader}, "processor.tokenizer.vocab_file": ""}
