"""The check itself: compile all ranks, train a single device and the cluster side by side, hold both together.

Where a difference begins is found by the step that differs first: once more on both sides, every operator's value compared.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from mindllm.compiled.conformance import Finding, findings, planned
from mindllm.compiled.graph.compiled_graph import CompiledGraph
from mindllm.compiled.rank.compile_ranks import RankCompilation
from mindllm.config import RunConfig
from mindllm.errors import CheckFailed
from mindllm.process.host_memory import ADVICE, MemoryClaim, gibibytes
from mindllm.reduced_runs.model import ACCUMULATION_STEPS
from mindllm.terminal.progress import Progress, unwatched
from mindllm.verify.beginning import beginning_problems
from mindllm.verify.compare import Comparison, is_of_loss
from mindllm.verify.locate import locate
from mindllm.verify.resume import resume_problems
from mindllm.verify.scope import Memory, Scope, SmallModel, fitting, recorded_bytes, scope_of
from mindllm.verify.side import ON_BOTH, Reference, train_cluster, train_single
from mindllm.verify.single import table_problems

LARGE_LOGITS = (
    "the loss of a step whose logits are beyond 88, and which is skipped: exponents are infinite there unless the largest logit "
    "is taken off first, over all ranks that share the vocabulary"
)
IN_BOTH = (
    "in what a single device and all ranks have alike: the ranks compute what a single device does, and in float64 its logits "
    "and moments give another loss or update"
)
NOT_OF_PIECES = "not looked for: operators of pieces (seq_split_num) have other rows than those of whole sequences"
MOST_RANKS = 64  # more take hours to compile


@dataclass(frozen=True)
class Options:
    """How to check. ``real_dtype`` computes in the dtypes of the YAML instead of fp32; a mesh of more than ``most_ranks`` is made
    smaller; ``resume`` also saves and resumes, where the ranks compute what they should. Without ``every_rank`` a few ranks of
    each stage are compiled, and the others derived where that is shown to be right. At most ``accumulation_steps`` are executed.
    """

    steps: int = 2
    real_dtype: bool = False
    mindspore_kernels: bool = False
    workers: int | None = None
    cache: Path | None = None
    most_ranks: int = MOST_RANKS
    resume: bool = False
    every_rank: bool = False
    accumulation_steps: int = ACCUMULATION_STEPS


@dataclass(frozen=True)
class Outcome:
    """The answer: two verdicts.

    ``problems`` is empty where all ranks together compute what a single device does; every one of ``asked_for`` holds where
    their graphs are what the YAML asks for. Where it was not ``executed``, it does not compile, or holds what cannot be
    executed here. ``resumed`` is empty where steps after a resume are those of a run that went on, None where that was not tried.
    ``config`` is that of the small model, ``scope`` what it leaves out of the YAML's. ``compiled``: the ranks that were; all
    others were derived from them. ``refused``: by stage, why none were.
    """

    config: RunConfig
    comparisons: tuple[Comparison, ...]
    problems: tuple[str, ...]
    ranks: int
    first_difference: str = ""
    asked_for: tuple[Finding, ...] = ()
    executed: bool = True
    seconds: Mapping[str, float] = field(default_factory=dict)
    scope: Scope | None = None
    memory: Memory | None = None
    resumed: tuple[str, ...] | None = None
    compiled: tuple[int, ...] = ()
    refused: Mapping[int, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return not self.problems and self.obeys

    @property
    def obeys(self) -> bool:
        """Whether the graphs have all the YAML asks for."""
        return all(finding.holds for finding in self.asked_for)


def check(config: RunConfig, options: Options, progress: Progress = unwatched) -> Outcome:
    """Checks the parallelism of ``config`` on a small model.

    Raises:
        UserError: the configuration is wrong, or does not compile.
    """
    with MemoryClaim() as claim:
        model = fitting(
            config, options.real_dtype, claim, options.most_ranks, options.workers, options.accumulation_steps
        )
        outcome = _check(model, scope_of(config, model.config), options, progress)
        memory = Memory(model.needs.total(model.workers), claim.budget, max(claim.peak, claim.taken()))
        plan = planned(config)
        return replace(outcome, memory=memory, asked_for=(*outcome.asked_for, *((plan,) if plan else ())))


def _check(model: SmallModel, scope: Scope, options: Options, progress: Progress) -> Outcome:
    small, begun = model.config, time.monotonic()
    with RankCompilation(small, options.cache, model.workers, every_rank=options.every_rank) as compilation:
        progress(f"compiling {scope.text}; {compilation.workers} at a time")
        reference = train_single(small, options.steps)

        def told(done: int) -> None:
            ranks = len(compilation.ranks)
            progress(f"compiling ranks{_left(done, ranks, time.monotonic() - begun)}", done, ranks)

        graphs = compilation.graphs(told)
    compiled = time.monotonic()
    progress("executing")
    try:
        comparisons = train_cluster(small, graphs, reference, options.mindspore_kernels)
    except CheckFailed as disagreement:
        outcome = Outcome(small, (), (str(disagreement),), len(graphs))
    else:
        outcome = judge(small, graphs, reference, comparisons, options.cache, progress)
    if options.resume and not outcome.problems:
        progress("saving and resuming")
        outcome = replace(outcome, resumed=resume_problems(small, graphs, reference))
    ended = time.monotonic()
    seconds = {"compile": compiled - begun, "execute": ended - compiled, "total": ended - begun}
    return replace(
        outcome,
        asked_for=findings(small, graphs),
        seconds=seconds,
        scope=scope,
        compiled=compilation.ranks,
        refused=compilation.refused,
    )


def _left(done: int, ranks: int, seconds: float) -> str:
    """About how long the ranks will take that are left, once that is known to be minutes."""
    return f", about {seconds / done * (ranks - done) / 60:.0f} min left" if 0 < done < ranks and seconds > 60 else ""


def refused(config: RunConfig, error: Exception) -> Outcome:
    """The answer for a configuration that does not compile, or has an operator that cannot be executed here."""
    return Outcome(config, (), (str(error),), config.parallel_config.device_num, executed=False)


def judge(
    config: RunConfig,
    graphs: list[CompiledGraph],
    reference: Reference,
    comparisons: tuple[Comparison, ...],
    cache: Path | None = None,
    progress: Progress = unwatched,
) -> Outcome:
    """The answer to comparisons of all steps; where one differs, also the operator at which it begins."""
    from mindllm.parallel.build import kernels_of

    positions = kernels_of(config).positions(config.model.config.seq_length)
    of_tables = (
        *table_problems(graphs, reference.tables, positions),
        *beginning_problems(graphs, config.seed, reference.begins),
    )
    for step, comparison in enumerate(comparisons):
        if problems := comparison.problems():
            progress("looking for the first operator that differs")
            of_loss = reference.tasks[step].spoiled is not None and all(map(is_of_loss, problems))
            if all(problem.endswith(ON_BOTH) for problem in problems):
                where = IN_BOTH
            else:
                where = LARGE_LOGITS if of_loss else _located(config, graphs, reference, step, cache)
            named = tuple(f"step {step + 1}: {problem}" for problem in problems)
            return Outcome(config, comparisons, (*of_tables, *named), len(graphs), where)
    return Outcome(config, comparisons, of_tables, len(graphs))


def _located(
    config: RunConfig, graphs: list[CompiledGraph], reference: Reference, step: int, cache: Path | None
) -> str:
    """Where the difference begins, or why that is not looked for: every value of every operator is kept for it, and compared with
    those of whole sequences.
    """
    if config.parallel_config.seq_split_num > 1:
        return NOT_OF_PIECES
    with MemoryClaim() as claim:
        if not claim.fits(wanted := recorded_bytes(config)):
            return f"not looked for: that takes about {gibibytes(wanted)}, and there are {claim.describe()}: {ADVICE}"
        claim.take(wanted)
        return locate(config, graphs, reference, step, cache)
