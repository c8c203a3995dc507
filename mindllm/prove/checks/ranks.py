"""Whether all ranks compute what one device does, their graphs are what the YAML asks for, and what they save is read again.

All three from one compilation of a small model.
"""

from __future__ import annotations

from collections.abc import Iterator

from mindllm.config import RunConfig
from mindllm.prove.answers import Answer, Finding, Standing
from mindllm.prove.checks.obeyed import obeyed
from mindllm.prove.pieces import Options
from mindllm.prove.questions import CHECKPOINTS, CONFORMANCE, PARITY
from mindllm.terminal.progress import Progress
from mindllm.verify.verification import Verification, silence_mindspore, verify_run


def answers(config: RunConfig, options: Options, progress: Progress) -> Iterator[Answer]:
    """Compile and execute all ranks, save and resume, and answer the three questions."""
    if config.parallel_config.device_num == 1:
        yield Answer(PARITY, Standing.PROVED, "one device: there are no ranks to differ")
        yield Answer(CONFORMANCE, Standing.PROVED, "one device: nothing is sharded")
        yield Answer(CHECKPOINTS, Standing.PROVED, "one device saves and reads whole tensors")
        return
    silence_mindspore()
    from mindllm.compiled.rank.compile_ranks import cache_directory
    from mindllm.verify.outcome import Options as How

    how = How(workers=options.workers, cache=cache_directory(), resume=True, every_rank=options.every_rank)
    found = verify_run(config, how, "run", progress)
    yield _parity(found)
    yield _conformance(found)
    yield _checkpoints(found)


def _checkpoints(found: Verification) -> Answer:
    """What a resume came to; sizes and room are added where the answer is put into a proof."""
    resumed = found.outcome.resumed
    if resumed is None:
        says = "no resume was tried, because the ranks compute something else"
        return Answer(CHECKPOINTS, Standing.NOT_PROVED, says, (Finding(says),))
    if resumed:
        says = "training goes on otherwise after a resume"
        return Answer(CHECKPOINTS, Standing.REFUTED, says, tuple(map(Finding, resumed)))
    how = "saved by all ranks of the small model and resumed by them and by a single device: the next step is the same"
    layouts = "whole tensors are saved, weights and optimizer state, so that any other layout reads them, too"
    return Answer(CHECKPOINTS, Standing.PROVED, "resumed with the same loss and state", (), (how, layouts))


def _parity(found: Verification) -> Answer:
    from mindllm.verify.report import compiled_text

    outcome = found.outcome
    checked = outcome.scope.text if outcome.scope else "unknown"
    figures = {key: value for key, value in found.tree().items() if key not in ("asked_for", "config")}
    where = outcome.first_difference
    ranks = (compiled_text(outcome),) if outcome.compiled else ()
    evidence = (f"checked: {checked}", *ranks, *_words(figures), *((f"first difference: {where}",) if where else ()))
    if not outcome.problems:
        says = f"{outcome.ranks} ranks compute the steps of one device (checked: {checked})"
        return Answer(PARITY, Standing.PROVED, says, (), evidence, figures=figures)
    advice = f"look at the first operator that differs: {where}" if where else ""
    findings = tuple(Finding(problem, advice) for problem in outcome.problems)
    standing = Standing.REFUTED if outcome.executed else Standing.NOT_PROVED
    says = (
        "the ranks compute something else than one device" if outcome.executed else "the ranks cannot be executed here"
    )
    return Answer(PARITY, standing, says, findings, evidence, figures=figures)


def _words(figures: dict) -> Iterator[str]:
    pairs = zip(figures["single_device_losses"], figures["losses"], strict=True)
    for step, (single, cluster) in enumerate(pairs, start=1):
        yield f"step {step}: loss {single:.6f} on one device, {cluster:.6f} on all ranks"
    for name, key in (("weights", "max_parameter_error"), ("optimizer state", "max_state_error")):
        yield f"largest error of {name}: {figures[key]:.1e}"


def _conformance(found: Verification) -> Answer:
    asked = found.outcome.asked_for
    if not asked:
        return Answer(CONFORMANCE, Standing.NOT_PROVED, "there are no graphs to look at")
    return obeyed(asked, "what the YAML asks for", f"{len(asked)} kinds of things are as the YAML asks")
