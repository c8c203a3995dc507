"""Run mode ``predict``: continues the prompts of ``input_data`` with the weights of ``load_checkpoint``."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import track

from mindllm.config import RunConfig
from mindllm.data import run_tokenizer
from mindllm.data.tokenizer import Tokenizer
from mindllm.generate.generator import Generator, Speed
from mindllm.generate.prompts import check_prompts, encode_prompt
from mindllm.generate.text_stream import TextStream
from mindllm.models import build_model
from mindllm.models.weights import assign, trained_weights
from mindllm.train.checkpoint import CheckpointStore
from mindllm.train.checkpoint.pretrained import pretrained_weights
from mindllm.train.device import set_up_device

BATCH = 8  # prompts that are continued together
terminal = Console(stderr=True, highlight=False, soft_wrap=True)


def predict(config: RunConfig) -> int:
    """Writes prompts and continuations to standard output, speed to standard error; returns the exit code.

    One prompt appears while it is continued; several are continued in batches.

    Raises:
        UserError: no weights or weights that do not fit, no tokenizer, no prompt or one that cannot be continued.
    """
    _need_weights(config)
    texts, model_config = read_prompts(config), config.model.config
    tokenizer = run_tokenizer(config)
    assert tokenizer is not None, "the configuration was checked for it"
    prompts = [encode_prompt(text, model_config, tokenizer) for text in texts]
    check_prompts(prompts, model_config, model_config.seq_length, config.generation.max_new_tokens)
    pretrained = pretrained_weights(config)
    set_up_device(config)
    with terminal.status("building the model"):
        model = build_model(model_config, config.context.device_target)
        assign(trained_weights(model), pretrained)
        generator = Generator(model, model_config, tokenizer, device_target=config.context.device_target)
    try:
        with _interruptible():
            if len(prompts) == 1:
                _stream(generator, config, texts[0], prompts[0])
            else:
                _in_batches(generator, tokenizer, config, texts, prompts)
    finally:
        terminal.print(describe(generator.speed))
    return 0


def read_prompts(config: RunConfig) -> list[str]:
    """The prompts of ``input_data``: its texts, or the lines of the file it names, without the empty ones."""
    value = config.input_data
    if value is None:
        raise config.error("input_data", "run_mode predict needs a prompt: a text, a list of texts, or a file of lines")
    if not isinstance(value, str):
        texts = list(value)
    elif _is_file(value):
        texts = [line for line in Path(value).read_text(encoding="utf-8").splitlines() if line.strip()]
    else:
        texts = [value]
    if not texts:
        raise config.error("input_data", "holds no prompt: give at least one")
    return texts


def describe(speed: Speed) -> str:
    """The speed as a line for people."""
    parts = [
        f"{name}: {tokens} tokens, {tokens / seconds:.1f} tokens/s"
        for name, tokens, seconds in (
            ("prefill", speed.prefill_tokens, speed.prefill_s),
            ("decode", speed.decode_tokens, speed.decode_s),
        )
        if seconds > 0
    ]
    return "; ".join([*parts, f"compilation: {speed.compile_s:.1f} s"])


def _stream(generator: Generator, config: RunConfig, text: str, prompt: Sequence[int]) -> None:
    with terminal.status("compiling"):
        generator.prepare(1, len(prompt), config.generation.max_new_tokens)
    try:
        _write(text)
        for piece in generator.stream(prompt, config.generation, config.seed):
            _write(piece)
    finally:
        _write("\n")


def _in_batches(
    generator: Generator,
    tokenizer: Tokenizer,
    config: RunConfig,
    texts: Sequence[str],
    prompts: Sequence[Sequence[int]],
) -> None:
    batches = generator.generate_in_batches(prompts, config.generation, BATCH, config.seed)
    total = -(-len(prompts) // BATCH)
    results = (
        result for batch in track(batches, "continuing", total, console=terminal, transient=True) for result in batch
    )
    for text, prompt, result in zip(texts, prompts, results, strict=True):
        stream = TextStream(tokenizer, prompt)
        _write(text + "".join(map(stream.push, result.tokens)) + stream.finish() + "\n\n")


@contextmanager
def _interruptible() -> Iterator[None]:
    """Lets Ctrl-C raise KeyboardInterrupt: MindSpore makes it send SIGTERM from the first graph on, so that is what counts."""
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous or signal.SIG_DFL)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _need_weights(config: RunConfig) -> None:
    if config.load_checkpoint:
        return
    newest = CheckpointStore(f"{config.output_dir}/checkpoint").newest()
    example = f", for example --load_checkpoint {newest}" if newest else ""
    raise config.error("load_checkpoint", f"run_mode predict needs weights; give a checkpoint directory{example}")


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except (OSError, ValueError):  # too long for a path, or with a null character
        return False
