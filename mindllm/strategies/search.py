"""The search: judge all candidates, reuse earlier judgements from a file, plan the best."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from mindllm.architecture.layer_counts import ONE_F_ONE_B, SEARCHED
from mindllm.axes import CONTEXT
from mindllm.config import RunConfig, load_config, override_config, render_config, tree_of
from mindllm.errors import UserError
from mindllm.jobs.pool import Task
from mindllm.jobs.ray_cluster import RayPool, is_spread
from mindllm.outside import append_lines, read_kept_lines
from mindllm.planning.costs.formula import formula_problem
from mindllm.planning.solve import Infeasible, solve
from mindllm.planning.yaml_plan import KEYS, write_plan
from mindllm.reduced_runs.even import even_keys
from mindllm.sources import software_key
from mindllm.strategies.candidates import Candidate, Sharing, candidates, read_candidate
from mindllm.strategies.constraints import UNLIMITED, Constraints
from mindllm.strategies.dispatch import Dispatch, run_dispatch, with_dispatch
from mindllm.strategies.judge import Judged, judge, read_judged
from mindllm.terminal.progress import Progress, unwatched
from mindllm.timing.configured import workload_of
from mindllm.timing.device import Device
from mindllm.timing.memory import stage_bytes
from mindllm.timing.step import StepTime, step_time
from mindllm.timing.verdict import RESERVED, Room
from mindllm.timing.workload import Workload

AnyJudged = TypeVar("AnyJudged", bound=Judged)
FILE = "candidates.jsonl"
UNPLANNED = "no plan of its layers fits the memory"
TOGETHER = 200  # candidates per task on a cluster, so that a task takes longer than starting its process
FUNCTION = f"{__name__}:judge_some"  # which nodes of the cluster call


@dataclass(frozen=True)
class SearchResult:
    """Results of a search, the fastest first, and the counts of excluded strategies by reason."""

    judged: tuple[Judged, ...]
    excluded: Counter[str]
    tried: int
    reused: int


@dataclass(frozen=True)
class Planned:
    """A candidate as a run: its configuration, predicted with the planner's placement of layers and recomputation.

    ``simulated``: its memory is that of a dry run.
    """

    candidate: Candidate
    config: RunConfig
    step: StepTime
    memory: tuple[float, ...]
    simulated: bool = False

    @property
    def source(self) -> str:
        """The source of its memory."""
        return "in the dry run" if self.simulated else "by formula"

    def room(self, limit: float) -> Room:
        """Return its memory next to the limit of a device."""
        return Room(self.memory, limit, 0.0 if self.simulated else RESERVED)


def search(
    config: RunConfig,
    devices: int,
    batch: int,
    device: Device,
    limit: float,
    directory: Path | None = None,
    progress: Progress = unwatched,
    constraints: Constraints = UNLIMITED,
    schedules: Collection[str] = (ONE_F_ONE_B,),
) -> SearchResult:
    """Judge every candidate in some of ``SEARCHED``.

    With a ``directory`` judgements are stored there, and those of an interrupted search of the same run are reused.
    """
    if config.swap_config.swap:
        raise config.error(
            "swap_config.swap", "a search chooses recomputation, not what waits on the host; write false"
        )
    excluded = Counter[str]()
    tried = candidates(config, devices, batch, device, excluded, schedules, constraints.dispatch)
    refusals = {candidate: constraints.refusal(candidate) for candidate in tried}
    allowed = [candidate for candidate, refusal in refusals.items() if not refusal]
    excluded.update(refusal for refusal in refusals.values() if refusal)
    key = _key(config, device, limit, constraints)
    judgements = (
        _read_judgements(directory / FILE, key, {candidate.name: candidate for candidate in allowed})
        if directory
        else {}
    )
    missing = [candidate for candidate in allowed if candidate.name not in judgements]
    with _judgement_file(directory, key) as keep:
        judged = (
            spread_judgements(config, missing, device, limit, constraints)
            if is_spread()
            else _judged(config, missing, device, limit, constraints)
        )
        for number, (candidate, judgement) in enumerate(judged):
            progress("predicting strategies", number, len(missing))
            judgements[candidate.name] = judgement
            keep(candidate.name, judgement)
    fitting = [judgement for candidate in allowed if (judgement := judgements[candidate.name]) is not None]
    excluded["no recomputation makes it fit the memory"] = len(allowed) - len(fitting)
    ranked = sorted(fitting, key=lambda candidate: -candidate.speed)
    return SearchResult(tuple(ranked), +excluded, len(allowed), len(allowed) - len(missing))


def _judged(
    config: RunConfig, candidates: Sequence[Candidate], device: Device, limit: float, constraints: Constraints
) -> Iterator[tuple[Candidate, Judged | None]]:
    bases = _workloads(config, candidates)
    for candidate in candidates:
        yield candidate, judge(config, bases[candidate.dispatch], candidate, device, limit, constraints)


def _workloads(config: RunConfig, candidates: Sequence[Candidate]) -> dict[Dispatch, Workload]:
    """Return the workload of a run with each dispatch of experts that candidates have."""
    return {
        dispatch: workload_of(with_dispatch(config, dispatch))
        for dispatch in {candidate.dispatch for candidate in candidates}
    }


@contextmanager
def _judgement_file(directory: Path | None, key: str) -> Iterator[Callable[[str, Judged | None], None]]:
    """Yield a function that immediately stores a judgement in the directory's file, if there is a directory."""
    if directory is None:
        yield lambda name, judged: None
        return
    with append_lines(directory / FILE) as file:

        def keep(name: str, judged: Judged | None) -> None:
            line = {"run": key, "name": name, "judged": judged.tree() if judged else None}
            file.write(json.dumps(line) + "\n")
            file.flush()

        yield keep


def _key(config: RunConfig, device: Device, limit: float, constraints: Constraints) -> str:
    judged_by = "" if constraints.recompute_attention else repr(sorted(constraints.kinds))
    text = render_config(config) + device.model_dump_json() + str(limit) + software_key() + judged_by
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _read_judgements(path: Path, key: str, allowed: Mapping[str, Candidate]) -> dict[str, Judged | None]:
    """Return the judgements of ``allowed`` candidates, by name, from earlier searches of this run.

    Raises:
        UserError: the file was not written by a search.
    """

    def read(line: Any) -> tuple[bool, str, Judged | None]:
        run, name, tree = line["run"], line["name"], line["judged"]
        judged = None if tree is None else read_judged(tree)
        if not isinstance(run, str) or (judged and judged.candidate != allowed.get(name, judged.candidate)):
            raise ValueError("a candidate under the name of another one")
        return run == key and name in allowed, name, judged

    try:
        lines = read_kept_lines(path, read)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    return {name: judged for is_current, name, judged in lines if is_current}


def plan_best(
    config: RunConfig,
    judged: Sequence[Judged],
    device: Device,
    limit: float,
    count: int,
    seconds: float,
    progress: Progress = unwatched,
    constraints: Constraints = UNLIMITED,
    on_refusal: Callable[[Candidate, str], None] = lambda candidate, reason: None,
) -> list[Planned]:
    """Plan layers and recomputation of the best candidates; return the runs, the fastest first.

    Planning ends after ``count`` plans, unless the next candidate is estimated as faster than all planned ones. A candidate
    without a plan is passed to ``on_refusal`` with the reason, and the next one takes its place. At most ``2 * count``
    additional candidates are tried.
    """
    planned: list[Planned] = []
    for number, estimate in enumerate(judged[: 3 * count]):
        fastest = max((run.step.tokens_per_device for run in planned), default=0.0)
        if len(planned) >= count and estimate.speed <= fastest:
            break
        progress("planning the best", min(number, count - 1), min(count, len(judged)))
        try:
            planned.append(plan_candidate(config, estimate.candidate, device, limit, seconds, constraints))
        except Infeasible:
            on_refusal(estimate.candidate, UNPLANNED)
        except UserError as error:
            on_refusal(estimate.candidate, str(error))
    return sorted(planned, key=lambda run: run.step.seconds)


def plan_candidate(
    config: RunConfig,
    candidate: Candidate,
    device: Device,
    limit: float,
    seconds: float,
    constraints: Constraints = UNLIMITED,
) -> Planned:
    """Return a candidate with layers and recomputation by the planner.

    Raises:
        Infeasible: nothing fits ``limit`` bytes.
        UserError: no plan was found in ``seconds``, or it has no YAML form.
    """
    plain = {**even_keys(config, candidate.pipeline_stage, candidate.chunks), **candidate.overrides()}
    bare = override_config(config, plain)
    problem = formula_problem(bare, device, limit, candidate.name, constraints.kinds)
    best = solve(problem, seconds).best
    written = write_plan(problem, best.plan)
    if written is None:
        raise UserError(f"{candidate.name}: the plan has no YAML form")
    lists = {key: value for key, value in written.overrides(problem).items() if not key.endswith("micro_batch_num")}
    run = override_config(config, {**plain, **lists})
    workload = workload_of(run)
    return Planned(candidate, run, step_time(workload, device), stage_bytes(workload))


def pareto(judged: Sequence[AnyJudged]) -> list[AnyJudged]:
    """Return the strategies that no other one beats in both speed and peak memory, the fastest first."""
    front: list[AnyJudged] = []
    least = math.inf
    for strategy in sorted(judged, key=lambda each: (-each.speed, max(each.memory))):
        if max(strategy.memory) < least:
            front.append(strategy)
            least = max(strategy.memory)
    return front


def decided_keys() -> frozenset[str]:
    """Return the keys of a run that a search decides, dispatch of experts and planned layers included."""
    planned = ("model.model_config.offset", *(f"recompute_config.{key}" for key in KEYS))
    mixture = Candidate(1, 1, 1, 1, 1, 1, False, False, 1, 1)
    return frozenset((*mixture.overrides(), *planned))


def evaluate_current(config: RunConfig, device: Device) -> Planned:
    """Return the run as its YAML is, with its prediction."""
    workload = workload_of(config)
    strategy, sizes = workload.strategy, config.parallel_config
    routed = config.model.config.expert_num > 1
    candidate = Candidate(
        sizes.data_parallel, sizes.model_parallel, sizes.pipeline_stage, workload.plan.chunks, strategy.micro_batch_size,
        strategy.micro_batches * strategy.accumulation, strategy.sequence_parallel, strategy.optimizer_shard,
        sizes.expert_parallel, sizes.expert_tensor_parallel if routed else None,
        Sharing(sizes.size(CONTEXT), sizes.exchanges_heads, sizes.context_parallel_balanced, sizes.passes_keys),
        strategy.schedule if sizes.pipeline_stage > 1 and strategy.schedule in SEARCHED else ONE_F_ONE_B, strategy.pieces,
        run_dispatch(config),
    )  # fmt: skip
    return Planned(candidate, config, step_time(workload, device), stage_bytes(workload))


def spread_judgements(
    config: RunConfig, candidates: Sequence[Candidate], device: Device, limit: float, constraints: Constraints
) -> Iterator[tuple[Candidate, Judged | None]]:
    """Yield candidates with judgements of the nodes of a Ray cluster, in the order of completion."""
    tree, described = tree_of(config), device.model_dump(mode="json")
    with RayPool() as cluster:
        groups = {}
        for first in range(0, len(candidates), TOGETHER):
            group = candidates[first : first + TOGETHER]
            arguments = (tree, [candidate.tree() for candidate in group], described, limit, constraints.tree())
            task = Task(f"judging {group[0].name} and others", FUNCTION, arguments)
            groups[id(task)] = group
            cluster.submit(task)
        for outcome in cluster.outcomes():
            for candidate, judged in zip(groups[id(outcome.task)], outcome.value, strict=True):
                yield candidate, read_judged(judged) if judged else None


def judge_some(
    tree: dict[str, Any],
    candidates: Sequence[dict[str, Any]],
    device: dict[str, Any],
    limit: float,
    constraints: dict[str, Any],
) -> list[dict[str, Any] | None]:
    """Judge candidates on a node; None for those that do not fit."""
    config, described = load_config(tree), Device.model_validate(device)
    limits, read = Constraints(**constraints), [read_candidate(one) for one in candidates]
    judgements = [judged for _, judged in _judged(config, read, described, limit, limits)]
    return [one.tree() if one else None for one in judgements]
