"""Continuations of prompts as tasks ask for them: the words of lm-evaluation-harness, in the section ``generation``'s."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from mindllm.config.generation import GenerationConfig
from mindllm.errors import UserError, nearest
from mindllm.evaluate.plan import Tokens, ordered
from mindllm.generate.generator import Generator

Key = TypeVar("Key")
PASSED_ON = {
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "num_beams",
    "length_penalty",
    "early_stopping",
    "seed",
}
OURS = {"until", "max_gen_toks"}


def generation_options(wishes: Mapping[str, Any], max_length: int, ends: tuple[str, ...]) -> GenerationConfig:
    """The options of ``wishes``: ``generation_kwargs`` of a task that were normalised by the harness.

    Arguments:
        max_length: most tokens of prompt and continuation.
        ends: names of the tokens that end a text; as texts they end a continuation, too.

    Raises:
        UserError: an option is none of ours, or there is no room for the tokens that are asked for.
    """
    room = int(wishes["max_gen_toks"])
    if room >= max_length:
        raise UserError(
            f"{room} new tokens are asked for, and the model works on {max_length} with the prompt "
            "(model.model_config.seq_length): give fewer, such as --gen_kwargs max_gen_toks=64"
        )
    if unknown := [name for name in wishes if name not in PASSED_ON | OURS]:
        raise UserError(f"--gen_kwargs {unknown[0]}: no such option{nearest(unknown[0], PASSED_ON | OURS)}")
    given = {name: value for name, value in wishes.items() if name in PASSED_ON and value is not None}
    if not given.get("do_sample"):
        given = {name: value for name, value in given.items() if name not in ("temperature", "top_k", "top_p", "min_p")}
    stops = tuple(dict.fromkeys(text for text in (*(wishes.get("until") or ()), *ends) if text))
    try:
        return GenerationConfig(**given, max_new_tokens=room, stop_strings=stops)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        raise UserError(f"--gen_kwargs {name}: {first['msg']} (value {first['input']})") from None


def in_batches(
    generator: Generator, prompts: Mapping[Key, Tokens], options: GenerationConfig, batch_size: int
) -> Iterator[tuple[Key, list[int]]]:
    """Yields the key of every prompt with the tokens that continue it, of a beam search the best ones."""
    keys: dict[Tokens, list[Key]] = {}
    for key, prompt in prompts.items():
        keys.setdefault(prompt, []).append(key)
    draws = options.do_sample
    waiting = [key for prompt in ordered(list(keys)) for key in (keys[prompt] if draws else keys[prompt][:1])]
    results = generator.generate_in_batches([prompts[key] for key in waiting], options, batch_size)
    flat = (result for batch in results for result in batch[:: options.num_return_sequences])
    for key, result in zip(waiting, flat, strict=True):
        for asked in [key] if draws else keys[prompts[key]]:
            yield asked, result.tokens
