"""Run mode ``predict``: continues what ``input_data`` asks for with the weights of ``load_checkpoint``."""

from __future__ import annotations

from collections.abc import Sequence

from mindllm.config import RunConfig
from mindllm.data import run_tokenizer
from mindllm.data.tokenizers.tokenizer import Tokenizer
from mindllm.generate.conversation import conversation_encoder
from mindllm.generate.generator import Generator
from mindllm.generate.load import load_generator, need_weights
from mindllm.generate.prompts import check_prompts, encode_prompt
from mindllm.generate.requests import Request, is_json_lines, read_requests
from mindllm.generate.results import open_results
from mindllm.generate.terminal import describe, terminal, write
from mindllm.process.interrupts import interruptible
from mindllm.terminal.console import progress


def predict(config: RunConfig) -> int:
    """Writes continuations to standard output or ``save_file``, speed to standard error; returns the exit code.

    One prompt appears while it is continued; several are continued in batches.

    Raises:
        UserError: no weights or weights that do not fit, no tokenizer, no prompt or one that cannot be continued.
    """
    need_weights(config)
    requests, model_config = read_requests(config), config.model.config
    tokenizer = run_tokenizer(config)
    prompts = _encoded(requests, config, tokenizer)
    check_prompts(prompts, model_config, model_config.seq_length, config.generation.max_new_tokens)
    generator = load_generator(config, tokenizer)
    try:
        with interruptible():
            if _appears_as_it_grows(config, requests):
                _stream(generator, config, requests[0].prompt, prompts[0])
            else:
                _in_batches(generator, config, requests, prompts)
    finally:
        terminal.print(describe(generator.speed))
    return 0


def _encoded(requests: Sequence[Request], config: RunConfig, tokenizer: Tokenizer) -> list[list[int]]:
    encode_conversation = conversation_encoder(config, tokenizer)
    return [
        encode_conversation(request.messages)
        if request.messages
        else encode_prompt(request.prompt, config.model.config, tokenizer)
        for request in requests
    ]


def _appears_as_it_grows(config: RunConfig, requests: Sequence[Request]) -> bool:
    options = config.generation
    one = len(requests) * max(options.num_beams, options.num_return_sequences) == 1
    return one and not config.save_file and not is_json_lines(config) and not options.output_logprobs


def _stream(generator: Generator, config: RunConfig, text: str, prompt: Sequence[int]) -> None:
    with terminal.status("compiling"):
        generator.prepare(1, len(prompt), config.generation)
    try:
        write(text)
        for piece in generator.stream(prompt, config.generation, config.seed):
            write(piece)
    finally:
        write("\n")


def _in_batches(
    generator: Generator, config: RunConfig, requests: Sequence[Request], prompts: Sequence[Sequence[int]]
) -> None:
    options, remaining = config.generation, iter(requests)
    with open_results(config) as put, progress() as bar:
        task = bar.add_task("continuing", total=len(requests))
        for batch in generator.generate_in_batches(prompts, options, config.predict_batch_size, config.seed):
            for start in range(0, len(batch), options.num_return_sequences):
                put(next(remaining), batch[start : start + options.num_return_sequences])
                bar.advance(task)
