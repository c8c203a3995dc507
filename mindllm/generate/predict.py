"""Run mode ``predict``: what ``input_data`` asks for, and how a generator continues it.

Results are JSON Lines for programs, also in a file that is whole or absent.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindllm.config import RunConfig
from mindllm.data import run_tokenizer
from mindllm.data.tokenizers.tokenizer import Tokenizer
from mindllm.files import atomic_open
from mindllm.generate.choosing.growing import Continuation
from mindllm.generate.generator import Generator
from mindllm.generate.load import need_weights
from mindllm.generate.prompts import Conversation, Message, check_prompts, conversation_encoder, encode_prompt
from mindllm.generate.requests import Request, is_json_lines, read_requests
from mindllm.terminal.progress import Progress, unwatched

Writer = Callable[[Request, Sequence[Continuation]], object]


@dataclass(frozen=True)
class Prompts:
    """The requests of a run with their token ids, which can be continued."""

    config: RunConfig
    tokenizer: Tokenizer
    requests: Sequence[Request]
    tokens: Sequence[Sequence[int]]

    @property
    def is_streamed(self) -> bool:
        """Whether it is one text whose continuation people read as it grows."""
        options = self.config.generation
        one = len(self.requests) * max(options.num_beams, options.num_return_sequences) == 1
        return one and not self.config.save_file and not is_json_lines(self.config) and not options.output_logprobs


def read_prompts(config: RunConfig) -> Prompts:
    """Return the prompts of ``input_data``; nothing is compiled or loaded.

    Raises:
        UserError: no weights are named, no tokenizer, no prompt or one that cannot be continued.
    """
    need_weights(config)
    requests, model_config = read_requests(config), config.model.config
    tokenizer = run_tokenizer(config)
    tokens = _encoded(requests, config, tokenizer)
    check_prompts(tokens, model_config, model_config.seq_length, config.generation.max_new_tokens)
    return Prompts(config, tokenizer, requests, tokens)


def continued(
    generator: Generator, prompts: Prompts, progress: Progress = unwatched
) -> Iterator[tuple[Request, Sequence[Continuation]]]:
    """Yield every request with its continuations, as soon as those of its batch are there."""
    config, options = prompts.config, prompts.config.generation
    copies, remaining, done = options.num_return_sequences, iter(prompts.requests), 0
    progress("continuing", done, len(prompts.requests))
    for batch in generator.generate_in_batches(prompts.tokens, options, config.predict_batch_size, config.seed):
        for start in range(0, len(batch), copies):
            yield next(remaining), batch[start : start + copies]
            done += 1
            progress("continuing", done, len(prompts.requests))


def _encoded(requests: Sequence[Request], config: RunConfig, tokenizer: Tokenizer) -> list[list[int]]:
    encode_conversation = conversation_encoder(config, tokenizer)
    return [
        encode_conversation(conversation)
        if (conversation := _conversation(request, config))
        else encode_prompt(request.prompt, config.model.config, tokenizer)
        for request in requests
    ]


def _conversation(request: Request, config: RunConfig) -> Conversation | None:
    """Return the conversation of a request, or that of its prompt where prompts are asked as in a conversation."""
    if request.conversation or not config.generation.apply_chat_template:
        return request.conversation
    system = config.generation.system_prompt
    first: tuple[Message, ...] = ({"role": "system", "content": system},) if system else ()
    return Conversation((*first, {"role": "user", "content": request.prompt}))


@contextmanager
def saved(config: RunConfig) -> Iterator[Writer]:
    """Yield the function that writes the continuations of a request to ``save_file``, which is whole or absent.

    Raises:
        UserError: the file cannot be written.
    """
    path = Path(config.save_file)
    if path.is_dir():
        raise config.error("save_file", f"{path} is a directory; write the name of a file in it")
    try:
        with atomic_open(path) as file:
            yield lambda request, continuations: file.write(json_line(request, continuations))
    except OSError as error:
        raise config.error("save_file", f"{path} cannot be written ({error.strerror})") from error


def json_line(request: Request, continuations: Sequence[Continuation]) -> str:
    """Return the line of JSON Lines with what the request had and its continuations."""
    return json.dumps(record(request, continuations), ensure_ascii=False) + "\n"


def record(request: Request, continuations: Sequence[Continuation]) -> dict[str, Any]:
    """What the request had, and ``continuations``: text, tokens, finish_reason, and where asked for logprobs and score."""
    return {**request.fields, "continuations": [_fields(continuation) for continuation in continuations]}


def _fields(continuation: Continuation) -> dict[str, Any]:
    fields = {"text": continuation.text, "finish_reason": continuation.finish_reason, "tokens": continuation.tokens}
    optional = {"logprobs": continuation.logprobs, "score": continuation.score}
    return fields | {name: value for name, value in optional.items() if value is not None}
