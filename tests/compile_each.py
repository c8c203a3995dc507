"""Compiles some ranks of many configurations, one at a time: ``python -m tests.compile_each DIRECTORY``.

The directory holds a YAML for every configuration; ``results.jsonl`` receives a line for every rank. MindSpore is imported once
and forked for every rank, which has a limit of time and memory of its own.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import tempfile
import traceback
from collections.abc import Hashable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from mindllm.compiled.device.parsed_sources import read_parsed, write_parsed
from mindllm.compiled.rank.compile_rank import PARSED
from mindllm.compiled.rank.host_needs import compile_bytes
from mindllm.config import RunConfig, load_config
from mindllm.errors import UserError
from mindllm.jobs.worker import LOG
from mindllm.parallel.layer_plan import make_plan
from mindllm.parallel.layout import mesh_of

RESULTS = "results.jsonl"
CPU_SECONDS_OF_A_RANK = 300
BYTES_OF_A_RANK = 4 << 30
LAST_LINES = 12


@dataclass(frozen=True)
class Compiled:
    """A rank that was compiled: what was wrong (nothing: it compiles), and what it took of CPU and memory."""

    config: str
    rank: int
    error: str
    seconds: float
    peak_mb: int


def main(directory: Path) -> None:
    """Compiles all; ranks whose results are there are not compiled again."""
    import mindllm.train.distributed_step  # noqa: F401  imported once, before the forks

    results = directory / RESULTS
    done = {(result.config, result.rank) for result in read_results(directory)}
    for path in sorted(directory.glob("*.yaml")):
        config = load_config(path)
        for rank in ranks_of_each_kind(config):
            if (path.stem, rank) not in done:
                result = _compiled(config, path.stem, rank)
                with open(results, "a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(result)) + "\n")


def read_results(directory: Path) -> list[Compiled]:
    """What was compiled so far."""
    with suppress(FileNotFoundError):
        return [Compiled(**json.loads(line)) for line in (directory / RESULTS).read_text().splitlines()]
    return []


def ranks_of_each_kind(config: RunConfig) -> Iterator[int]:
    """The first rank of every stage that differs from those before it: in its layers or their recomputation, or as an end."""
    plan, specs = make_plan(config), config.model.config.architecture.layers
    seen: set[Hashable] = set()
    for stage in range(plan.stages):
        layers = [
            (layer.chunk, layer.kind(spec))
            for layer, spec in zip(plan.layers, specs, strict=True)
            if layer.stage == stage
        ]
        kind = (stage == 0, stage == plan.stages - 1, tuple(layers))
        if kind not in seen:
            yield stage * mesh_of(config).stage_device_num
        seen.add(kind)


def _compiled(config: RunConfig, name: str, rank: int) -> Compiled:
    with tempfile.TemporaryDirectory(prefix="mindllm_compile_each_") as directory:
        Path(directory, LOG).touch()
        process = os.fork()
        if process == 0:
            _compile(config, rank, Path(directory))
        _, status, usage = os.wait4(process, 0)
        log = Path(directory, LOG).read_text(errors="replace")
        if status == 0:
            read_parsed(Path(directory, PARSED))  # those that are forked from now on find it parsed
    error = "" if status == 0 else _why(os.waitstatus_to_exitcode(status), log)
    return Compiled(name, rank, error, round(usage.ru_utime + usage.ru_stime, 1), usage.ru_maxrss >> 10)


def _why(code: int, log: str) -> str:
    last = "\n".join(log.strip().splitlines()[-LAST_LINES:])
    return f"not done in {CPU_SECONDS_OF_A_RANK} s of CPU" if code == -signal.SIGXCPU else f"ended with {code}: {last}"


def _compile(config: RunConfig, rank: int, directory: Path) -> None:
    """The forked process; it does not return."""
    from mindllm.compiled.device.front_end import environment
    from mindllm.compiled.rank.compile_rank import compile_to, text_of_last_graph

    code = 1
    try:
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS_OF_A_RANK, resource.RLIM_INFINITY))
        limit = max(BYTES_OF_A_RANK, compile_bytes(config) * 5 // 4)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        log = os.open(directory / LOG, os.O_WRONLY)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(directory)
        os.environ.update({**environment(rank, mesh_of(config).device_num), **text_of_last_graph(directory)})
        compile_to(config, rank, directory)
        write_parsed(directory / PARSED)
        code = 0
    except UserError as error:
        print(error)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
