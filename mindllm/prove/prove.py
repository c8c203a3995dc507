"""Proves a run: formulas at once, then pieces of work beside each other, each answer as it is known."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from datetime import date, datetime, timezone
from itertools import chain
from pathlib import Path

from mindllm.axes import EXPERTS, NAMED_AXES
from mindllm.config import RunConfig
from mindllm.errors import UserError
from mindllm.jobs.store import Store
from mindllm.outside import read_compressed_json
from mindllm.prove.answers import Answer, Standing, located, merged, of_error
from mindllm.prove.checks.checkpoints import with_sizes
from mindllm.prove.expected import configuration, expected, left_open
from mindllm.prove.found import hash_of, versions_here
from mindllm.prove.pieces import PIECES, Options, Piece
from mindllm.prove.proof import Proof, Run, in_order
from mindllm.prove.questions import CHECKPOINTS, CONFIGURATION, QUESTIONS, STEP_TIME
from mindllm.prove.run_pieces import PieceAnswers, PieceProgress, run_pieces
from mindllm.timing.prediction import IN_MINDFORMERS
from mindllm.timing.shipped import DEFAULT
from mindllm.units import counted, parameters_in_words

Answered = Callable[[Answer], None]
Executor = Callable[[RunConfig, list[Piece], Options, PieceProgress], Iterator[PieceAnswers]]
ANSWERS = Store("proofs", max_entries=400)
NO_CONFIGURATION = "the configuration does not load"


def prove_run(
    config: RunConfig,
    options: Options,
    name: str = "run",
    *,
    quick: bool = False,
    allowed: Collection[str] = (),
    use_kept: bool = True,
    executor: Executor = run_pieces,
    answered: Answered = lambda answer: None,
    told: PieceProgress = lambda piece, what, done, total: None,
) -> Proof:
    """Answer all questions about a run.

    Args:
        config: the run.
        options: how to prove.
        name: what the proof calls it.
        quick: stop after the configuration and the formulas.
        allowed: questions that may stay without a proof; those that no proof answers for a run on a CPU are added.
        use_kept: answer from earlier proofs what has not changed since.
        executor: does the pieces.
        answered: called with every answer as it is known; what formulas expect comes first.
        told: called with what pieces are doing.

    Returns:
        The proof. Ctrl-C ends the work and keeps what is known: then it is not ``complete``.
    """
    begun = time.monotonic()
    answers: dict[str, Answer] = {}

    def know(answer: Answer) -> None:
        answers[answer.question] = _with_places(config, answer)
        answered(answers[answer.question])

    know(configuration(config))
    for answer in expected(config, options.device or DEFAULT, remedies=quick):
        know(answer)
    estimate, complete = answers.get(STEP_TIME), False
    if not quick:
        try:
            for answer in _proved(config, options, use_kept, executor, told):
                if answer.question == CHECKPOINTS:
                    answer = with_sizes(config, answer)
                elif answer.question == STEP_TIME:
                    answer = _with_step_in_mindformers(answer, estimate)
                know(answer)
            complete = True
        except KeyboardInterrupt:
            pass
    for question in QUESTIONS:
        answers.setdefault(question, Answer(question, Standing.NOT_PROVED, "not looked at"))
    return Proof(
        _run_of(config, name),
        in_order(answers),
        tuple(dict.fromkeys((*allowed, *left_open(config, options.device or DEFAULT)))),
        time.monotonic() - begun,
        complete,
        options.device or DEFAULT,
    )


def refused(name: str, error: UserError, allowed: Collection[str] = ()) -> Proof:
    """Return the proof of a run whose configuration does not load: refuted at the first question, all others open."""
    count = len(error.problems)
    says = f"{count} mistake{'s' * (count > 1)}"
    answers = {CONFIGURATION: Answer(CONFIGURATION, Standing.REFUTED, says, of_error(error))}
    for question in QUESTIONS:
        answers.setdefault(question, Answer(question, Standing.NOT_PROVED, NO_CONFIGURATION))
    run = Run(name, "", {}, versions_here(), 0, _now())
    return Proof(run, in_order(answers), tuple(allowed))


def _proved(
    config: RunConfig, options: Options, use_kept: bool, executor: Executor, told: PieceProgress
) -> Iterator[Answer]:
    """Yield answers that are kept, then those of pieces as they end, which are kept from then on.

    What several pieces answer comes when all of them have, in the order of the pieces.
    """
    keys = {piece.name: piece.key(config, options) for piece in PIECES}
    known = {
        piece.name: load_answers(key) if use_kept and (key := keys[piece.name]) is not None else () for piece in PIECES
    }
    parts: dict[str, dict[str, Answer]] = {}
    for piece, answers in chain(
        ((piece, known[piece.name]) for piece in PIECES if known[piece.name]),
        executor(config, [piece for piece in PIECES if not known[piece.name]], options, told),
    ):
        key = keys[piece.name]
        if key and not known[piece.name] and all(answer.standing is Standing.PROVED for answer in answers):
            store_answers(key, answers)
        for answer in answers:
            of_question = parts.setdefault(answer.question, {})
            of_question[piece.name] = answer
            answering = [one.name for one in PIECES if answer.question in one.questions]
            if len(of_question) == len(answering):
                yield merged([of_question[name] for name in answering])


def store_answers(key: str, answers: Sequence[Answer]) -> None:
    """Store the answers of a piece, with their pages and today's date."""
    tree = {"proved_on": date.today().isoformat(), "answers": [answer.tree() for answer in answers]}
    with ANSWERS.writing(f"{key}.json.gz") as path, gzip.open(path, "wt", encoding="utf-8", compresslevel=5) as text:
        json.dump(tree, text)


def load_answers(key: str) -> tuple[Answer, ...]:
    """Return stored answers with the day they were proved on; empty if they are missing or cannot be read."""
    return ANSWERS.read(f"{key}.json.gz", _read_answers) or ()


def _read_answers(path: Path) -> tuple[Answer, ...]:
    tree = read_compressed_json(path)
    return tuple(Answer.of_tree({**answer, "proved_on": tree["proved_on"]}) for answer in tree["answers"])


def _with_step_in_mindformers(answer: Answer, estimate: Answer | None) -> Answer:
    """Return the answer with the step in MindFormers itself, as the estimate has it.

    Pieces of work read the resolved run, which has no keys of MindFormers, and answers are shared by runs that resolve alike.
    """
    if estimate is None or IN_MINDFORMERS not in estimate.figures or not answer.figures:
        return answer
    return replace(answer, figures={**answer.figures, IN_MINDFORMERS: estimate.figures[IN_MINDFORMERS]})


def _with_places(config: RunConfig, answer: Answer) -> Answer:
    """The answer with the file and line of every key; pieces know the keys alone."""
    return replace(answer, findings=tuple(located(config, finding) for finding in answer.findings))


def _run_of(config: RunConfig, name: str) -> Run:
    return Run(name, hash_of(config), dict(_words(config)), versions_here(), config.seed, _now())


def _words(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Model, strategy and batch as people say them."""
    model, sizes, runner = config.model.config, config.parallel_config, config.runner_config
    label = config.trainer.model_name or model.type
    size = parameters_in_words(model.parameter_count())
    yield "model", f"{label}: {size}, {model.layer_count} layers of {model.hidden_size:,}"
    axes = ", ".join(f"{axis.key} {sizes.size(axis)}" for axis in (*NAMED_AXES, EXPERTS) if sizes.size(axis) > 1)
    yield "strategy", axes or "one device"
    yield "devices", f"{sizes.device_num:,} ({config.context.device_target})"
    tokens = config.global_batch_size * model.seq_length
    yield "batch", f"{config.global_batch_size:,} sequences of {model.seq_length:,} tokens, {tokens:,} tokens a step"
    again = f", accumulated {rounds:,} times" if (rounds := runner.gradient_accumulation_steps) > 1 else ""
    pieces = f" in {sizes.seq_split_num} pieces" if sizes.seq_split_num > 1 else ""
    yield "micro-batches", f"{sizes.micro_batch_num:,} of {counted(runner.batch_size, 'sequence')}{pieces}{again}"
    yield "computes in", model.compute_dtype


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
