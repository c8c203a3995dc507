"""Proofs that are made by hand, for tests of what is written about them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindllm.prove.answers import Answer, Finding, Standing
from mindllm.prove.proof import Proof, Run
from mindllm.prove.questions import CHECKPOINTS, COMMUNICATION, MEMORY, QUESTIONS, STEP_TIME
from mindllm.units import GB, GIB, MIB

WORDS = {"model": "llama: 7 billion parameters", "devices": "16 (Ascend)"}
VERSIONS = {"mindllm": "0.1.0", "mindspore": "2.10.0", "python": "3.11.7"}
STAGES = [41.4 * GIB, 40 * GIB]
SHORTAGE = Finding("stage 0 needs 0.009 GB more", "lower batch_size", "context.max_device_memory", "runs/a run.yaml", 7)


def figures(stages=STAGES, step=30.4, mfu=0.4, exchanged=0, checkpoint=100 * GB) -> dict[str, dict[str, Any]]:
    """Return what answers know by their questions."""
    rows = [{"stage": number, "peak": size} for number, size in enumerate(stages)]
    return {
        MEMORY: {"peak": max(stages), "limit": 58 * GIB, "stages": rows},
        STEP_TIME: {"seconds": step, "model_flops_utilisation": mfu},
        COMMUNICATION: {"bytes": exchanged * MIB, "seconds": 0.0},
        CHECKPOINTS: {"checkpoint": checkpoint},
    }


def proof(
    changed: Mapping[str, Standing | Answer] | None = None,
    *,
    known: Mapping[str, dict[str, Any]] | None = None,
    name: str = "runs/a run.yaml",
    words: Mapping[str, str] = WORDS,
    config_hash: str = "f00d",
    **options: Any,
) -> Proof:
    """Return a proof in which all is proved, but for what is ``changed``."""
    known = figures() if known is None else known
    answers = []
    for question in QUESTIONS:
        given = (changed or {}).get(question, Standing.PROVED)
        made = (
            Answer(question, given, f"{question} says so", figures=known.get(question, {}), seconds=1.5)
            if isinstance(given, Standing)
            else given
        )
        answers.append(made)
    run = Run(name, config_hash, words, VERSIONS, 42, "2026-11-20T14:03:05+00:00")
    return Proof(run, tuple(answers), **{"seconds": 61.5, "device": "atlas_800t_a2", **options})
