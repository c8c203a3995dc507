"""The check itself: compile all ranks, train a single device and the cluster side by side, hold both together.

What imports MindSpore is imported where it is needed: the process that compiles the ranks, which does as well, starts first.
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

ENDS = 8  # of ranks, of which the time between them is a measure


def check(config: RunConfig, options: Options, progress: Progress = unwatched) -> Outcome:
    """Checks the parallelism of ``config`` on a small model.

    Raises:
        UserError: the configuration is wrong, or does not compile.
    """
    with MemoryClaim() as claim, first_core_kept():  # executing takes one core, and comes last
        model = fitting(
            config, options.real_dtype, claim, options.most_ranks, options.workers, options.accumulation_steps
        )
        outcome = _check(model, scope_of(config, model.config), options, progress)
        from mindllm.compiled.conformance import planned

        memory = Memory(model.needs.total(model.workers), claim.budget, max(claim.peak, claim.taken()))
        plan = planned(config)
        return replace(outcome, memory=memory, asked_for=(*outcome.asked_for, *((plan,) if plan else ())))


def _check(model: SmallModel, scope: Scope, options: Options, progress: Progress) -> Outcome:
    small, begun = model.config, time.monotonic()
    with RankCompilation(small, options.cache, model.workers, every_rank=options.every_rank) as compilation:
        progress(f"compiling {scope.text}; {compilation.workers} at a time")
        from mindllm.verify.side import train_single  # MindSpore: the process of the ranks imports it at the same time

        reference = train_single(small, options.steps)
        left = Left()

        def told(done: int) -> None:
            ranks = len(compilation.ranks)
            progress(f"compiling ranks{left.text(done, ranks, time.monotonic())}", done, ranks)

        graphs = compilation.graphs(told)
    from mindllm.compiled.conformance import findings
    from mindllm.verify.judge import judge
    from mindllm.verify.resume import resume_problems
    from mindllm.verify.side import train_cluster

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


class Left:
    """About how long the ranks will take that are left: as long for each as the last ones took, once that is minutes.

    What went before the first one is no measure: ranks wait for cores on which stages are simulated, and begin together.
    """

    def __init__(self) -> None:
        self._ends: deque[tuple[int, float]] = deque(maxlen=ENDS)

    def text(self, done: int, ranks: int, now: float) -> str:
        """Return ``, about 3 min left``, or nothing where that is not known or less than a minute; ``now`` in seconds."""
        if done and (not self._ends or done > self._ends[-1][0]):
            self._ends.append((done, now))
        if len(self._ends) < 2:
            return ""
        (first, then), (last, since) = self._ends[0], self._ends[-1]
        minutes = ((since - then) / (last - first) * (ranks - last) - (now - since)) / 60
        return f", about {minutes:.0f} min left" if minutes >= 1 else ""
