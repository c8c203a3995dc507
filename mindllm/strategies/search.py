"""The search: all candidates judged, what was judged before taken from a file, the best ones planned."""

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
from mindllm.dry_run.cache import versions
from mindllm.errors import UserError
from mindllm.jobs.pool import Task
from mindllm.jobs.ray_cluster import RayPool, is_spread
from mindllm.outside import append_lines, read_kept_lines
from mindllm.planning.costs.formula import formula_problem
from mindllm.planning.solve import Infeasible, solve
from mindllm.planning.yaml_plan import KEYS, write_plan
from mindllm.reduced_runs.even import even_keys
from mindllm.strategies.candidates import Candidate, Sharing, candidates, read_candidate
from mindllm.strategies.constraints import UNLIMITED, Constraints
from mindllm.strategies.dispatch import Dispatch, own_dispatch, with_dispatch
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
NO_PLAN = "no plan of its layers fits the memory"
TOGETHER = 200  # candidates of a piece on a cluster: what they take should be more than starting a process
FUNCTION = f"{__name__}:judge_some"  # which nodes of the cluster call


@dataclass(frozen=True)
class Found:
    """What a search found, the fastest first, and why other strategies were left out."""

    judged: tuple[Judged, ...]
    left_out: Counter[str]
    tried: int
    kept: int


@dataclass(frozen=True)
class Planned:
    """A candidate as a run: its configuration, predicted with the planner's placement of layers and recomputation.

    ``simulated``: whether its memory is what a dry run found.
    """

    candidate: Candidate
    config: RunConfig
    step: StepTime
    memory: tuple[float, ...]
    simulated: bool = False

    @property
    def source(self) -> str:
        """Who says what memory it needs."""
        return "in the dry run" if self.simulated else "by formula"

    def room(self, limit: float) -> Room:
        """Its memory beside what a device gives."""
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
) -> Found:
    """Judge every candidate in some of ``SEARCHED``.

    With a ``directory`` what is judged is kept there, and what an interrupted search of the same run judged is not judged again.
    """
    if config.swap_config.swap:
        raise config.error(
            "swap_config.swap", "a search chooses recomputation, not what waits on the host; write false"
        )
    left_out = Counter[str]()
    tried = candidates(config, devices, batch, device, left_out, schedules, constraints.dispatch)
    every = {one: constraints.refusal(one) for one in tried}
    wanted = [one for one, refusal in every.items() if not refusal]
    left_out.update(refusal for refusal in every.values() if refusal)
    key = _key(config, device, limit, constraints)
    known = _known(directory / FILE, key, {one.name: one for one in wanted}) if directory else {}
    missing = [one for one in wanted if one.name not in known]
    with _kept(directory, key) as keep:
        judged = (
            spread_judgements(config, missing, device, limit, constraints)
            if is_spread()
            else _judged(config, missing, device, limit, constraints)
        )
        for number, (one, found) in enumerate(judged):
            progress("predicting strategies", number, len(missing))
            known[one.name] = found
            keep(one.name, found)
    fitting = [found for one in wanted if (found := known[one.name]) is not None]
    left_out["no recomputation makes it fit the memory"] = len(wanted) - len(fitting)
    ranked = sorted(fitting, key=lambda one: -one.speed)
    return Found(tuple(ranked), +left_out, len(wanted), len(wanted) - len(missing))


def _judged(
    config: RunConfig, wanted: Sequence[Candidate], device: Device, limit: float, constraints: Constraints
) -> Iterator[tuple[Candidate, Judged | None]]:
    bases = _workloads(config, wanted)
    for one in wanted:
        yield one, judge(config, bases[one.dispatch], one, device, limit, constraints)


def _workloads(config: RunConfig, wanted: Sequence[Candidate]) -> dict[Dispatch, Workload]:
    """Return the workload of a run with each dispatch of experts that candidates have."""
    return {dispatch: workload_of(with_dispatch(config, dispatch)) for dispatch in {one.dispatch for one in wanted}}


@contextmanager
def _kept(directory: Path | None, key: str) -> Iterator[Callable[[str, Judged | None], None]]:
    """Yield what keeps a judgement of a candidate at once: in the directory's file, or nowhere."""
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
    text = render_config(config) + device.model_dump_json() + str(limit) + versions() + judged_by
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _known(path: Path, key: str, wanted: Mapping[str, Candidate]) -> dict[str, Judged | None]:
    """Return the judgements of ``wanted`` candidates, by name, that earlier searches of this run left in a file.

    Raises:
        UserError: the file was not written by a search.
    """

    def read(line: Any) -> tuple[bool, str, Judged | None]:
        run, name, tree = line["run"], line["name"], line["judged"]
        judged = None if tree is None else read_judged(tree)
        if not isinstance(run, str) or (judged and judged.candidate != wanted.get(name, judged.candidate)):
            raise ValueError("a candidate under the name of another one")
        return run == key and name in wanted, name, judged

    try:
        lines = read_kept_lines(path, read)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    return {name: judged for is_wanted, name, judged in lines if is_wanted}


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

    Planning ends with ``count`` of them, or goes on while the next candidate is estimated as faster than all planned ones. A
    candidate without a plan is left out and gives its place to the next; ``on_refusal`` gets it with the reason. No more than
    twice ``count`` are tried beyond the first ``count``.
    """
    planned: list[Planned] = []
    for number, one in enumerate(judged[: 3 * count]):
        fastest = max((run.step.tokens_per_device for run in planned), default=0.0)
        if len(planned) >= count and one.speed <= fastest:
            break
        progress("planning the best", min(number, count - 1), min(count, len(judged)))
        try:
            planned.append(plan_one(config, one.candidate, device, limit, seconds, constraints))
        except Infeasible:
            on_refusal(one.candidate, NO_PLAN)
        except UserError as error:
            on_refusal(one.candidate, str(error))
    return sorted(planned, key=lambda run: run.step.seconds)


def plan_one(
    config: RunConfig,
    candidate: Candidate,
    device: Device,
    limit: float,
    seconds: float,
    constraints: Constraints = UNLIMITED,
) -> Planned:
    """A candidate with layers placed and recomputed as the planner says.

    Raises:
        Infeasible: nothing fits ``limit`` bytes.
        UserError: no plan was found in ``seconds``, or none that a YAML says.
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
    """Return the strategies that no other one beats in both speed and memory of the fullest stage, the fastest first."""
    front: list[AnyJudged] = []
    least = math.inf
    for one in sorted(judged, key=lambda each: (-each.speed, max(each.memory))):
        if max(one.memory) < least:
            front.append(one)
            least = max(one.memory)
    return front


def decided_keys() -> frozenset[str]:
    """Return the keys of a run that a search decides, dispatch of experts and planned layers included."""
    planned = ("model.model_config.offset", *(f"recompute_config.{key}" for key in KEYS))
    mixture = Candidate(1, 1, 1, 1, 1, 1, False, False, 1, 1)
    return frozenset((*mixture.overrides(), *planned))


def own(config: RunConfig, device: Device) -> Planned:
    """The run as its YAML is, predicted alike."""
    workload = workload_of(config)
    strategy, sizes = workload.strategy, config.parallel_config
    routed = config.model.config.expert_num > 1
    candidate = Candidate(
        sizes.data_parallel, sizes.model_parallel, sizes.pipeline_stage, workload.plan.chunks, strategy.micro_batch_size,
        strategy.micro_batches * strategy.accumulation, strategy.sequence_parallel, strategy.optimizer_shard,
        sizes.expert_parallel, sizes.expert_tensor_parallel if routed else None,
        Sharing(sizes.size(CONTEXT), sizes.exchanges_heads, sizes.context_parallel_balanced, sizes.passes_keys),
        strategy.schedule if sizes.pipeline_stage > 1 and strategy.schedule in SEARCHED else ONE_F_ONE_B, strategy.pieces,
        own_dispatch(config),
    )  # fmt: skip
    return Planned(candidate, config, step_time(workload, device), stage_bytes(workload))


def spread_judgements(
    config: RunConfig, wanted: Sequence[Candidate], device: Device, limit: float, constraints: Constraints
) -> Iterator[tuple[Candidate, Judged | None]]:
    """Yield candidates with what the nodes of a Ray cluster say of them, as it comes, some hundreds by each piece of work."""
    tree, described = tree_of(config), device.model_dump(mode="json")
    with RayPool() as cluster:
        groups = {}
        for first in range(0, len(wanted), TOGETHER):
            group = wanted[first : first + TOGETHER]
            arguments = (tree, [one.tree() for one in group], described, limit, constraints.tree())
            task = Task(f"judging {group[0].name} and others", FUNCTION, arguments)
            groups[id(task)] = group
            cluster.submit(task)
        for outcome in cluster.outcomes():
            for one, judged in zip(groups[id(outcome.task)], outcome.value, strict=True):
                yield one, read_judged(judged) if judged else None


def judge_some(
    tree: dict[str, Any],
    candidates: Sequence[dict[str, Any]],
    device: dict[str, Any],
    limit: float,
    constraints: dict[str, Any],
) -> list[dict[str, Any] | None]:
    """Judge candidates on a node; None for those that do not fit."""
    config, known = load_config(tree), Device.model_validate(device)
    limits, read = Constraints(**constraints), [read_candidate(one) for one in candidates]
    found = [judged for _, judged in _judged(config, read, known, limit, limits)]
    return [one.tree() if one else None for one in found]
