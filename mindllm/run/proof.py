"""The proof of a run at its start: the log line about it, ``require_proof``, and the predictions that steps are compared with."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mindllm.config import RunConfig
from mindllm.errors import CheckFailed

if TYPE_CHECKING:
    from mindllm.prove.proof import Proof

KEY = "require_proof"
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prediction:
    """Figures that a proof predicts for the steps of a run.

    Attributes:
        seconds: time of a step.
        error: relative error that about nine of ten measured steps stay within; None if unknown.
        peak: bytes used on the device of the first rank; None without a dry run.
    """

    seconds: float
    error: float | None = None
    peak: float | None = None


@dataclass(frozen=True)
class ProofSummary:
    """The log line about the proof of a run, and its prediction. Empty on ranks other than the first."""

    line: str = ""
    prediction: Prediction | None = None


NO_PROOF = ProofSummary()


def summarize_proof(config: RunConfig) -> ProofSummary:
    """Look up the proof of a run. An unreadable proof file does not keep the run from starting.

    Raises:
        CheckFailed: ``require_proof`` is true, and no proof has the verdict ready.
    """
    proof, line, prediction = None, "not proved; its proof cannot be read", None
    try:
        from mindllm.prove.found import find_proof, line_about

        proof = find_proof(config)
        line = line_about(config, proof)
        prediction = predict_steps(proof, config) if proof else None
    except Exception:  # a proof edited by hand, or an unreadable home directory
        logger.debug("reading the proof of this run failed", exc_info=True)
    if config.require_proof and not is_ready(proof):
        # The line ends with the command that proves the run.
        state, _, command = line.partition("; ")
        advice = f"run {command}" if command else "prove it again"
        raise CheckFailed(str(config.problem((KEY,), f"{state} (value true); {advice}, or write false")))
    return ProofSummary(line, prediction)


def is_ready(proof: Proof | None) -> bool:
    """Return True if a proof is complete, has the verdict ready, and was made by the software in use."""
    if proof is None or not proof.complete:
        return False
    from mindllm.prove.found import other_versions
    from mindllm.prove.proof import Verdict

    return proof.verdict is Verdict.READY and not other_versions(proof)


def predict_steps(proof: Proof, config: RunConfig) -> Prediction | None:
    """Return the prediction of a complete proof; None if the proof is for another kind of device."""
    memory, step = (proof.answer(name).figures for name in ("memory", "step_time"))
    seconds = _positive(step.get("seconds"))
    if not proof.complete or step.get("device_target") != config.context.device_target or seconds is None:
        return None
    stages = memory.get("stages") or [{}]
    return Prediction(seconds, _positive(step.get("step_error")), _positive(stages[0].get("peak")))


def _positive(value: object) -> float | None:
    return value if isinstance(value, int | float) and 0 < value < math.inf else None
