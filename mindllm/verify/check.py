"""The check itself: compile all ranks, train a single device and the cluster side by side, hold both together.

What imports MindSpore is imported where it is needed: the process that compiles the ranks, which does as well, starts first.
"""

from __future__ import annotations

import time
from dataclasses import replace

from mindllm.compiled.rank.compile_ranks import RankCompilation
from mindllm.config import RunConfig
from mindllm.errors import CheckFailed
from mindllm.process.host_memory import MemoryClaim
from mindllm.terminal.progress import Progress, unwatched
from mindllm.verify.outcome import Options, Outcome
from mindllm.verify.scope import Memory, Scope, SmallModel, fitting, scope_of


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

        def told(done: int) -> None:
            ranks = len(compilation.ranks)
            progress(f"compiling ranks{_left(done, ranks, time.monotonic() - begun)}", done, ranks)

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


def _left(done: int, ranks: int, seconds: float) -> str:
    """About how long the ranks will take that are left, once that is known to be minutes."""
    return f", about {seconds / done * (ranks - done) / 60:.0f} min left" if 0 < done < ranks and seconds > 60 else ""
