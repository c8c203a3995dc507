"""Run mode ``predict``: continuations on standard output or in ``save_file``, their speed on standard error."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from mindllm.config import RunConfig
from mindllm.generate.choosing.growing import Continuation
from mindllm.generate.generator import Generator
from mindllm.generate.load import finding_weights, load_generator
from mindllm.generate.predict import Prompts, Writer, continued, json_line, read_prompts, saved
from mindllm.generate.requests import Request, is_json_lines
from mindllm.process.interrupts import interruptible
from mindllm.terminal.console import error_console, write
from mindllm.terminal.render import drawn


def predict(config: RunConfig) -> None:
    """Continue what ``input_data`` asks for: one prompt appears while it grows, several are continued in batches.

    Raises:
        UserError: no weights or weights that do not fit, no tokenizer, no prompt or one that cannot be continued.
    """
    with finding_weights(config) as weights:
        prompts = read_prompts(config)
        with error_console.status("building the model"):
            generator = load_generator(config, prompts.tokenizer, weights.result())
    error_console.print(config.generation.describe())
    try:
        with interruptible():
            (_stream if prompts.is_streamed else _in_batches)(generator, prompts)
    finally:
        error_console.print(generator.speed.describe())


def _stream(generator: Generator, prompts: Prompts) -> None:
    config, tokens = prompts.config, prompts.tokens[0]
    with error_console.status("compiling"):
        generator.prepare(1, len(tokens), config.generation)
    try:
        if not config.generation.apply_chat_template:
            write(prompts.requests[0].prompt)
        for piece in generator.stream(tokens, config.generation, config.seed):
            write(piece)
    finally:
        write("\n")


def _in_batches(generator: Generator, prompts: Prompts) -> None:
    with _opened(prompts.config) as put, drawn() as progress:
        for request, continuations in continued(generator, prompts, progress):
            put(request, continuations)


@contextmanager
def _opened(config: RunConfig) -> Iterator[Writer]:
    """Yield what writes the continuations of a request: JSON Lines where they came as such, or go to ``save_file``."""
    if config.save_file:
        with saved(config) as put:
            yield put
        error_console.print(f"results: {Path(config.save_file)}")
    elif is_json_lines(config):
        yield lambda request, continuations: write(json_line(request, continuations))
    else:
        shown = _dialogue if config.generation.apply_chat_template else _continued
        yield lambda request, continuations: write(shown(request, continuations))


def _continued(request: Request, continuations: Sequence[Continuation]) -> str:
    return "".join(f"{request.prompt}{one.text}\n\n" for one in continuations)


def _dialogue(request: Request, continuations: Sequence[Continuation]) -> str:
    return "".join(f"> {request.prompt}\n{one.text}\n\n" for one in continuations)
