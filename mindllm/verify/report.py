"""Render outcomes: tables for people, an object for programs, and rows of a document."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindllm.axes import NAMED_AXES
from mindllm.config import RunConfig
from mindllm.errors import UserError
from mindllm.files import atomic_open
from mindllm.jobs.memory import gibibytes
from mindllm.outside import read_text
from mindllm.terminal.tables import Table, figures, texts
from mindllm.terminal.text import styled
from mindllm.verify.compare import Comparison, TensorError
from mindllm.verify.outcome import Outcome

if TYPE_CHECKING:
    from mindllm.results import Part

PROBLEMS_SHOWN = 8
HEAD = (
    "| configuration | devices | layout | as the YAML asks | largest error: loss | weights | optimizer state "
    "| seconds: compile | execute | checked |"
)
MATCH = "all ranks match a single device"
GRAPHS_MATCH, GRAPHS_DIFFER = "the graphs match the YAML", "the graphs do not match the YAML"


def as_json(outcome: Outcome) -> dict[str, Any]:
    """Return an outcome as plain values. Overflowing steps have no loss."""
    steps = [comparison for comparison in outcome.comparisons if not comparison.single.overflow]
    return {
        "ok": outcome.ok,
        "ranks": outcome.ranks,
        "compiled_ranks": list(outcome.compiled),
        "derived_ranks": outcome.ranks - len(outcome.compiled) if outcome.compiled else 0,
        "not_derived": {str(stage): reason for stage, reason in outcome.refused.items()},
        "layout": layout(outcome.config),
        "dtype": outcome.config.model.config.compute_dtype,
        "checked": outcome.scope.as_json() if outcome.scope else None,
        "memory": asdict(outcome.memory) if outcome.memory else None,
        "losses": [comparison.cluster.loss for comparison in steps],
        "single_device_losses": [comparison.single.loss for comparison in steps],
        "global_norms": [comparison.cluster.norms[0] for comparison in steps],
        "single_device_global_norms": [comparison.single.global_norm for comparison in steps],
        "tokens": [comparison.cluster.tokens[0] for comparison in steps],
        "max_parameter_error": _largest(outcome.comparisons, moments=False),
        "max_state_error": _largest(outcome.comparisons, moments=True),
        "overflow_skipped": all(all(item.cluster.overflows) for item in outcome.comparisons if item.single.overflow),
        "problems": list(outcome.problems),
        "first_difference": outcome.first_difference,
        "obeys": outcome.obeys,
        "asked_for": [{**asdict(finding), "holds": finding.holds} for finding in outcome.asked_for],
        "seconds": round(outcome.seconds.get("total", 0.0), 1),
        "compile_seconds": round(outcome.seconds.get("compile", 0.0), 1),
        "execute_seconds": round(outcome.seconds.get("execute", 0.0), 1),
    }


def outcome_parts(outcome: Outcome, name: str) -> Iterator[Part]:
    """Yield a table of steps with the largest errors, a table of graph properties, and both verdicts."""
    names = ("step", "single device", "cluster", "gradient norm", "tokens")
    table = Table(f"{name}: {describe(outcome)}", figures(*names))
    for number, item in enumerate(outcome.comparisons, start=1):
        if item.single.overflow:
            skipped = "skipped" if all(item.cluster.overflows) else "not skipped"
            table.add_row(str(number), "overflow, skipped", f"overflow, {skipped}", "", "")
            continue
        losses, norms = (item.single.loss, item.cluster.loss), (item.single.global_norm, item.cluster.norms[0])
        table.add_row(
            str(number),
            f"{losses[0]:.6f}",
            f"{losses[1]:.6f}",
            f"{norms[0]:.6f} / {norms[1]:.6f}",
            str(item.cluster.tokens[0]),
        )
    yield table if outcome.comparisons else table.title
    for title, moments in (("weights", False), ("optimizer state", True)):
        if error := _worst(outcome.comparisons, moments):
            yield f"largest error of {title}: {error.absolute:.1e} ({error.name}, rank {error.rank})"
    yield from _verdict_parts(outcome)
    if outcome.asked_for:
        yield from _graph_parts(outcome)


def _graph_parts(outcome: Outcome) -> Iterator[Part]:
    table = Table("", texts("", "asked for", "in the compiled graphs", " "))
    for finding in outcome.asked_for:
        table.add_row(finding.what, finding.asked, finding.found, "" if finding.holds else "differs")
    yield table
    for finding in outcome.asked_for:
        for problem in finding.problems[:PROBLEMS_SHOWN]:
            yield f"  {finding.what}: {problem}"
        if len(finding.problems) > PROBLEMS_SHOWN:
            yield f"  and {len(finding.problems) - PROBLEMS_SHOWN} more"
    verdict = (GRAPHS_MATCH, "bold green") if outcome.obeys else (GRAPHS_DIFFER, "bold red")
    yield styled(verdict)


def compiled_text(outcome: Outcome) -> str:
    """Return the numbers of compiled and of derived ranks, and why all ranks of a stage were compiled."""
    compiled, derived = len(outcome.compiled), outcome.ranks - len(outcome.compiled)
    words = [f"{compiled} ranks compiled; {derived} derived from them (--every-rank compiles all)"]
    if not derived:
        words = [f"all {compiled} ranks compiled"]
    words += [f"stage {stage}: no rank derived, because {reason}" for stage, reason in outcome.refused.items()]
    return "; ".join(words)


def _verdict_parts(outcome: Outcome) -> Iterator[Part]:
    if outcome.compiled:
        yield compiled_text(outcome)
    if seconds := outcome.seconds:
        yield f"compiled in {seconds['compile']:.1f} s, executed in {seconds['execute']:.1f} s"
    if memory := outcome.memory:
        words = {"taken": memory.taken, "estimated": memory.estimated, "allowed": memory.budget}
        yield "memory: " + ", ".join(f"{gibibytes(count)} {word}" for word, count in words.items())
    if not outcome.problems:
        yield styled((MATCH, "bold green"), _checked(outcome))
        return
    for problem in outcome.problems[:PROBLEMS_SHOWN]:
        yield f"  {problem}"
    if len(outcome.problems) > PROBLEMS_SHOWN:
        yield f"  and {len(outcome.problems) - PROBLEMS_SHOWN} more"
    if outcome.first_difference:
        yield styled(("first difference:", "bold"), f" {outcome.first_difference}")
    yield styled((_failure(outcome), "bold red"), _checked(outcome))


def _checked(outcome: Outcome) -> str:
    return f" (checked: {outcome.scope.text})" if outcome.scope else ""


def _failure(outcome: Outcome) -> str:
    if not outcome.executed:
        return "cannot be checked"
    if not outcome.comparisons:
        return "the ranks do not complete a step"
    return "the ranks differ from a single device"


def describe(outcome: Outcome) -> str:
    """Return devices, layout and dtype in a few words."""
    return f"{outcome.ranks} ranks, {layout(outcome.config)}, {outcome.config.model.config.compute_dtype}"


def layout(config: RunConfig) -> str:
    """Return a layout in short form, as ``dp2 tp2 pp2 micro 4, sequence parallel, optimizer parallel``."""
    from mindllm.parallel.layer_plan import make_plan

    sizes, parallel = config.parallel_config, config.parallel
    words = [" ".join(f"{axis.name}{sizes.size(axis)}" for axis in NAMED_AXES if sizes.size(axis) > 1)]
    words[0] += f" micro {sizes.micro_batch_num}" if sizes.pipeline_stage > 1 else ""
    words[0] += f" of {sizes.seq_split_num} pieces" if sizes.seq_split_num > 1 else ""
    words += [f"interleave {config.model.config.pp_interleave_num}"] * (config.model.config.pp_interleave_num > 1)
    words += ["heads for sequence (Ulysses)"] * sizes.exchanges_heads
    words += ["ring"] * sizes.passes_keys
    words += ["balanced halves"] * sizes.context_parallel_balanced
    words += ["sequence parallel"] * sizes.use_seq_parallel
    words += ["optimizer parallel"] * parallel.enable_parallel_optimizer
    words += [f"{config.runner_config.gradient_accumulation_steps} accumulation steps"] * (
        config.runner_config.gradient_accumulation_steps > 1
    )
    words += ["recompute"] * any(layer.recompute or layer.patterns for layer in make_plan(config).layers)
    return ", ".join(word for word in words if word)


def read_table(path: Path) -> dict[str, str]:
    """Return the rows of a table that :func:`write_table` wrote, by configuration; none if ``path`` does not exist.

    Raises:
        UserError: ``path`` is another file, which would be overwritten.
    """
    try:
        lines = read_text(path).splitlines()
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    if lines and HEAD not in lines:
        raise UserError(f"{path}: not a table of mindllm check; pass another file")
    return {line.split("`")[1]: line for line in lines if line.startswith("| `")}


def write_table(rows: Sequence[tuple[str, Outcome]], path: Path) -> None:
    """Write a table in Markdown. Rows of other configurations in ``path`` stay."""
    lines = read_table(path)
    lines |= {name: _row(name, outcome) for name, outcome in rows}
    with atomic_open(path) as file:
        file.write("\n".join([HEAD, "|---" * HEAD.count(" |") + "|", *lines.values()]) + "\n")


def _row(name: str, outcome: Outcome) -> str:
    tree = as_json(outcome)
    pairs = zip(tree["losses"], tree["single_device_losses"], strict=True)
    loss = max((abs(a - b) for a, b in pairs), default=0.0)
    errors = f"{loss:.1e} | {tree['max_parameter_error']:.1e} | {tree['max_state_error']:.1e}"
    seconds = " | ".join(f"{outcome.seconds.get(phase, 0.0):.0f}" for phase in ("compile", "execute"))
    verdict = f"{_failure(outcome)}: {outcome.problems[0].splitlines()[0]} | |" if outcome.problems else errors
    checked = outcome.scope.text if outcome.scope else "unknown"
    cells = (f"`{name}`", outcome.ranks, layout(outcome.config), _graphs_cell(outcome), verdict, seconds, checked)
    return f"| {' | '.join(map(str, cells))} |"


def _graphs_cell(outcome: Outcome) -> str:
    """Return ``yes``, or the graph properties that differ from the YAML."""
    if not outcome.asked_for:
        return "unknown"
    return ", ".join(f"not: {finding.what}" for finding in outcome.asked_for if not finding.holds) or "yes"


def _worst(comparisons: Sequence[Comparison], moments: bool) -> TensorError | None:
    errors = [error for item in comparisons if (error := item.worst(moments)) is not None]
    return max(errors, key=lambda error: error.absolute, default=None)


def _largest(comparisons: Sequence[Comparison], moments: bool) -> float:
    error = _worst(comparisons, moments)
    return error.absolute if error else 0.0
