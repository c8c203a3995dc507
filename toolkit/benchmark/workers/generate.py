"""The sides of the generation benchmark: each continues a batch of prompts whenever it is told to, and says how long it took."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from toolkit.benchmark.side import serve

Sizes = dict[str, int]
HEAD_DIM = 32


def mindllm_side(sizes: Sizes) -> Callable[[list[list[int]]], int]:
    """Returns the function that continues prompts greedily and returns the number of new tokens."""
    import mindspore as ms

    ms.set_device("CPU")
    ms.set_context(mode=ms.GRAPH_MODE)
    from mindllm.config import ModelConfig
    from mindllm.config.generation import GenerationConfig
    from mindllm.generate.generator import Generator
    from mindllm.models import build_model
    from mindllm.models.weights import initialise, trained_weights

    config = ModelConfig(
        vocab_size=sizes["vocab"],
        hidden_size=sizes["hidden"],
        num_layers=sizes["layers"],
        num_heads=sizes["hidden"] // HEAD_DIM,
        n_kv_heads=sizes["kv_heads"],
        intermediate_size=sizes["intermediate"],
        seq_length=sizes["prompt"] + sizes["new"],
    )
    model = build_model(config)
    initialise(trained_weights(model), seed=0)
    generator, options = Generator(model, config), GenerationConfig(max_new_tokens=sizes["new"])
    return lambda prompts: sum(len(result.tokens) for result in generator.generate(prompts, options))


def transformers_side(sizes: Sizes) -> Callable[[list[list[int]]], int]:
    """The same with Hugging Face's Llama in eager PyTorch."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(sizes["threads"])
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=sizes["vocab"],
        hidden_size=sizes["hidden"],
        num_hidden_layers=sizes["layers"],
        num_attention_heads=sizes["hidden"] // HEAD_DIM,
        num_key_value_heads=sizes["kv_heads"],
        intermediate_size=sizes["intermediate"],
        max_position_embeddings=sizes["prompt"] + sizes["new"],
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).eval()

    def run(prompts: list[list[int]]) -> int:
        with torch.inference_mode():
            tokens = torch.tensor(prompts)
            output = model.generate(tokens, max_new_tokens=sizes["new"], do_sample=False)
        return int(output.numel() - tokens.numel())

    return run


def timed(
    build: Callable[[Sizes], Callable[[list[list[int]]], int]],
) -> Callable[[Sizes], Callable[[], dict[str, Any]]]:
    """Makes of a side one whose rounds continue the same random prompts and answer with tokens and seconds."""

    def side(sizes: Sizes) -> Callable[[], dict[str, Any]]:
        run = build(sizes)
        random = np.random.default_rng(0)
        prompts = random.integers(1, sizes["vocab"], (sizes["batch"], sizes["prompt"])).tolist()

        def round_() -> dict[str, Any]:
            start = time.perf_counter()
            tokens = run(prompts)
            return {"tokens": tokens, "seconds": time.perf_counter() - start}

        return round_

    return side


SIDES = {"mindllm": timed(mindllm_side), "transformers": timed(transformers_side)}

if __name__ == "__main__":
    serve(SIDES)
