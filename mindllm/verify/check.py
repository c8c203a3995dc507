"""The cluster check: compile all ranks, train a single device and the ranks, and compare both.

Imports of MindSpore are delayed, so that the process that compiles the ranks, which imports it too, starts first.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import replace

from mindllm.compiled.rank.compile_ranks import RankCompilation
from mindllm.config import RunConfig
from mindllm.errors import CheckFailed
from mindllm.jobs.cores import first_core_kept
from mindllm.jobs.memory import MemoryClaim
from mindllm.terminal.progress import Progress, unwatched
from mindllm.verify.outcome import Options, Outcome
from mindllm.verify.scope import Memory, Scope, SmallModel, fitting, scope_of

MEASURED_RANKS = 8  # the last ranks, whose rate predicts the remaining time


def check(config: RunConfig, options: Options, progress: Progress = unwatched) -> Outcome:
    """Check the parallelism of ``config`` on a small model.

    Raises:
        UserError: the configuration is wrong, or does not compile.
    """
    # execution comes last and takes one core
    with MemoryClaim() as claim, first_core_kept():
        model = fitting(
            config, options.real_dtype, claim, options.most_ranks, options.workers, options.accumulation_steps
        )
        outcome = _check(model, scope_of(config, model.config), options, progress)
        from mindllm.compiled.conformance import planned

        memory = Memory(model.needs.total(model.workers), claim.budget, max(claim.peak, claim.taken()))
        plan = planned(config)
        return replace(outcome, memory=memory, asked_for=(*outcome.asked_for, *((plan,) if plan else ())))


def _check(model: SmallModel, scope: Scope, options: Options, progress: Progress) -> Outcome:
    small, start = model.config, time.monotonic()
    with RankCompilation(small, options.cache, model.workers, every_rank=options.every_rank) as compilation:
        progress(f"compiling {scope.text}; {compilation.workers} at a time")
        # imports MindSpore while the process of the ranks does the same
        from mindllm.verify.side import train_single

        reference = train_single(small, options.steps)
        remaining = RemainingTime()

        def on_rank(done: int) -> None:
            ranks = len(compilation.ranks)
            progress(f"compiling ranks{remaining.text(done, ranks, time.monotonic())}", done, ranks)

        graphs = compilation.graphs(on_rank)
    from mindllm.compiled.conformance import findings
    from mindllm.verify.locate import judge
    from mindllm.verify.resume import resume_problems
    from mindllm.verify.side import train_cluster

    compiled = time.monotonic()
    progress("executing")
    try:
        comparisons = train_cluster(small, graphs, reference, options.mindspore_kernels)
    except CheckFailed as deadlock:
        outcome = Outcome(small, (), (str(deadlock),), len(graphs))
    else:
        outcome = judge(small, graphs, reference, comparisons, options.cache, progress)
    if options.resume and not outcome.problems:
        progress("saving and resuming")
        outcome = replace(outcome, resumed=resume_problems(small, graphs, reference))
    end = time.monotonic()
    return replace(
        outcome,
        asked_for=findings(small, graphs),
        seconds={"compile": compiled - start, "execute": end - compiled, "total": end - start},
        scope=scope,
        compiled=compilation.ranks,
        refused=compilation.refused,
    )


class RemainingTime:
    """Estimate of the time to compile the remaining ranks, from the rate of the last ones.

    The time before the first rank does not count: ranks wait for cores of simulations, and start together.
    """

    def __init__(self) -> None:
        self._ends: deque[tuple[int, float]] = deque(maxlen=MEASURED_RANKS)

    def text(self, done: int, ranks: int, now: float) -> str:
        """Return ``, about 3 min left``; empty if that is unknown or less than a minute. ``now`` is in seconds."""
        if done and (not self._ends or done > self._ends[-1][0]):
            self._ends.append((done, now))
        if len(self._ends) < 2:
            return ""
        (first, start), (last, end) = self._ends[0], self._ends[-1]
        minutes = ((end - start) / (last - first) * (ranks - last) - (now - end)) / 60
        return f", about {minutes:.0f} min left" if minutes >= 1 else ""
