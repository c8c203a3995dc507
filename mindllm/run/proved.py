"""What a run has of its proof: the line it begins with, ``require_proof``, and figures to hold the measured ones against."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mindllm.config import RunConfig
from mindllm.errors import CheckFailed, Problem

if TYPE_CHECKING:
    from mindllm.prove.proof import Proof

KEY = "require_proof"
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Predicted:
    """What a proof predicts of the steps of a run.

    Attributes:
        seconds: of a step.
        error: share of it within which about nine of ten measured steps are; None where that is not known.
        peak: bytes of the device of the first rank; None where no dry run tells.
    """

    seconds: float
    error: float | None = None
    peak: float | None = None


@dataclass(frozen=True)
class Found:
    """The line that a run begins with, and what its proof predicts; of a rank that is not the first, nothing."""

    line: str = ""
    predicted: Predicted | None = None


NOTHING_FOUND = Found()


def find(config: RunConfig) -> Found:
    """Look for the proof of a run; whatever is wrong with the file of one, the run begins.

    Raises:
        CheckFailed: ``require_proof`` is true, and there is none that says ready.
    """
    proof, line, predicted = None, "not proved; its proof cannot be read", None
    try:
        from mindllm.prove.found import find_proof, line_about

        proof = find_proof(config)
        line = line_about(config, proof)
        predicted = predicted_by(proof, config) if proof else None
    except Exception:  # of a file that somebody has written by hand, or a home that cannot be read
        logger.debug("the proof of this run", exc_info=True)
    if config.require_proof and not is_ready(proof):
        raise CheckFailed(str(_refusal(config, line)))
    return Found(line, predicted)


def is_ready(proof: Proof | None) -> bool:
    """Return whether a proof is complete, says ready, and is of the software that is used here."""
    if proof is None or not proof.complete:
        return False
    from mindllm.prove.found import other_versions
    from mindllm.prove.proof import Verdict

    return proof.verdict is Verdict.READY and not other_versions(proof)


def _refusal(config: RunConfig, line: str) -> Problem:
    """The command stands in the line already, behind what is said of the proof."""
    said, _, command = line.partition("; ")
    advice = f"run {command}" if command else "prove it again"
    return config.problem((KEY,), f"{said} (value true); {advice}, or write false")


def predicted_by(proof: Proof, config: RunConfig) -> Predicted | None:
    """Return what a complete proof predicts; None where it is of other devices than those that execute the run."""
    memory, step = (proof.answer(name).figures for name in ("memory", "step_time"))
    seconds = _positive(step.get("seconds"))
    if not proof.complete or step.get("device_target") != config.context.device_target or seconds is None:
        return None
    stages = memory.get("stages") or [{}]
    return Predicted(seconds, _positive(step.get("step_error")), _positive(stages[0].get("peak")))


def _positive(value: object) -> float | None:
    return value if isinstance(value, int | float) and 0 < value < math.inf else None
