"""A side of the benchmark of codes: a model with its projections in floats or in codes, that writes tokens or trains adapters."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from toolkit.benchmark.side import serve

Sizes = dict[str, Any]
HEAD_DIM = 64
KINDS = {"float32": None, "int8": "uint8", "int4": "uint4", "nf4": "nf4"}
RATE = 1e-3


def make_config(sizes: Sizes, kind: str, **keys: Any):
    """The model of a side; its projections are in codes of ``kind``."""
    from mindllm.config import ModelConfig
    from mindllm.families import with_file_names

    code = KINDS[kind]
    section = {"quant_method": "gptq", "code": code, "group_size": sizes["group"]}
    model = ModelConfig.model_validate(
        {
            "vocab_size": sizes["vocab"],
            "hidden_size": sizes["hidden"],
            "num_layers": sizes["layers"],
            "num_heads": sizes["hidden"] // HEAD_DIM,
            "intermediate_size": sizes["intermediate"],
            "seq_length": sizes["length"],
            **({} if code is None else {"quantization_config": section}),
            **keys,
        }
    )
    return with_file_names(model)


def answer(tokens: int, start: float) -> dict[str, Any]:
    """Tokens and seconds of a round, and memory in MB: of the process now, and at most."""
    seconds = time.perf_counter() - start
    with open("/proc/self/statm", encoding="utf-8") as file:
        pages = int(file.read().split()[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"tokens": tokens, "seconds": seconds, "mb": pages * os.sysconf("SC_PAGE_SIZE") / 2**20, "peak_mb": peak}


def built(config: Any) -> Any:
    """The model with weights that are drawn."""
    import mindspore as ms

    from mindllm.finetune.transform import build_tuned_model
    from mindllm.models.weights import initialise, model_weights, quantized_parameters

    ms.set_device("CPU")
    ms.set_context(mode=ms.GRAPH_MODE)
    model = build_tuned_model(config)
    initialise({**model_weights(model), **quantized_parameters(model)}, seed=0)
    return model


def writes(kind: str, sizes: Sizes) -> Callable[[], dict[str, Any]]:
    """Greedy generation with the kernels in C++."""
    import numpy as np

    from mindllm.config.generation import GenerationConfig
    from mindllm.generate.generator import Generator

    config = make_config(sizes, kind).frozen
    generator = Generator(built(config), config)
    options = GenerationConfig(max_new_tokens=sizes["length"] - 16)
    prompts = np.random.default_rng(0).integers(1, sizes["vocab"], (sizes["batch"], 16)).tolist()

    def run() -> dict[str, Any]:
        before, start = generator.speed.decode_s, time.perf_counter()
        tokens = sum(len(result.tokens) for result in generator.generate(prompts, options))
        found = answer(tokens, start)
        return {**found, "seconds": generator.speed.decode_s - before}

    return run


def trains(kind: str, sizes: Sizes) -> Callable[[], dict[str, Any]]:
    """Steps of adapters of rank 8 beside all projections."""
    import mindspore as ms
    import numpy as np
    from mindspore import Tensor

    from mindllm.config.optimizer import OptimizerConfig
    from mindllm.models.weights import trained_weights
    from mindllm.train.optimizers.adamw import AdamW
    from mindllm.train.step import TrainStep

    config = make_config(sizes, kind, pet_config={"lora_rank": 8})
    model = built(config)
    optimizer = AdamW(list(trained_weights(model).values()), OptimizerConfig(), pet=config.pet_config)
    step = TrainStep(model, optimizer, 1.0).set_train()
    shape = (sizes["batch"], sizes["length"])
    tokens = np.random.default_rng(0).integers(1, sizes["vocab"], shape).astype(np.int32)
    inputs = [Tensor(tokens), Tensor(np.roll(tokens, -1, 1)), Tensor(np.ones(shape, np.float32))]

    def run() -> dict[str, Any]:
        start = time.perf_counter()
        loss, *_ = step(*inputs, Tensor(RATE, ms.float32), Tensor(1.0, ms.float32))
        found = float(loss.asnumpy())
        return {**answer(tokens.size, start), "loss": found}

    return run


SIDES = {
    **{f"write {kind}": partial(writes, kind) for kind in KINDS},
    **{f"train {kind}": partial(trains, kind) for kind in KINDS},
}

if __name__ == "__main__":
    serve(SIDES)
