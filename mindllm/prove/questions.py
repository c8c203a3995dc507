"""The questions of a proof, in the order in which pages and tables show them. This table is read by help, docs and tests."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Question:
    """One question.

    Attributes:
        name: how options and JSON call it.
        text: the question.
        by: what answers it, in a few words.
        verb: the command that looks closer, given ``--config``; empty where there is none.
        open: what no proof can say about it on this machine.
    """

    name: str
    text: str
    by: str
    verb: str = ""
    open: str = ""


CONFIGURATION, MEMORY, PARITY, CONFORMANCE = "configuration", "memory", "parity", "conformance"
RECOMPUTATION, COMMUNICATION, STEP_TIME = "recomputation", "communication", "step_time"
DATA, CHECKPOINTS, START = "data", "checkpoints", "start"

QUESTIONS = {
    question.name: question
    for question in (
        Question(CONFIGURATION, "Is the configuration sound?", "loading and all cross checks"),
        Question(
            MEMORY,
            "Does every stage fit, with workspace of kernels?",
            "MindSpore's dry run of every stage",
            "dry-run",
            "memory that CANN and HCCL take beside the pool of a device, and the workspace of kernels, which is estimated",
        ),
        Question(
            PARITY,
            "Do all ranks together compute what one device does?",
            "all ranks of a small model compiled and executed beside a single device",
            "check",
            "the kernels of the device and its half precision: ranks are executed on a CPU in fp32",
        ),
        Question(
            CONFORMANCE,
            "Do the graphs conform to the YAML?",
            "layers, chunks, recomputation, sharded state, messages, strategies and dtypes in the compiled graphs",
            "check",
        ),
        Question(
            RECOMPUTATION,
            "Does recomputation save what was meant?",
            "bytes kept for the backward pass in a compiled stage, pattern by pattern",
            "inspect recompute",
        ),
        Question(
            COMMUNICATION,
            "Is there communication nobody asked for?",
            "layout changes that the compiler put into a stage",
            "inspect redundant",
        ),
        Question(
            STEP_TIME,
            "How long is a step, and how far from the best?",
            "the model of time, and the planner's bound for this strategy",
            "time",
            "the speed of this cluster: a step is predicted from a described device, slow nodes and links are not",
        ),
        Question(
            DATA,
            "Will the data do?",
            "files, tokens, vocabulary and special tokens",
            "view",
            "whether every node reads the same files: ranks compare that when a run starts",
        ),
        Question(
            CHECKPOINTS,
            "Can it be saved and resumed?",
            "sizes, room, and the small model saved by all ranks and resumed by them and by a single device",
            "",
            "the speed of the file system of the cluster",
        ),
        Question(
            START,
            "Will it start?",
            "versions, ranks, directories and ports as far as this machine has them",
            "preflight",
            "devices, driver, CANN and network of the nodes: mindllm preflight asks them there",
        ),
    )
}
