"""The answer to what both sides have computed: where they differ, and at which operator that begins.

It is looked for by the step that differs first: once more on both sides, every operator's value compared.
"""

from __future__ import annotations

from pathlib import Path

from mindllm.compiled.graph.compiled_graph import CompiledGraph
from mindllm.config import RunConfig
from mindllm.jobs.memory import ADVICE, MemoryClaim, gibibytes
from mindllm.terminal.progress import Progress, unwatched
from mindllm.verify.beginning import beginning_problems
from mindllm.verify.compare import Comparison, is_loss_problem
from mindllm.verify.locate import locate
from mindllm.verify.outcome import Outcome
from mindllm.verify.scope import recorded_bytes
from mindllm.verify.side import ON_BOTH, Reference
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
            of_loss = reference.tasks[step].spoiled is not None and all(map(is_loss_problem, problems))
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
