"""The sides of the training-step benchmark: the same weights, batches and optimizer here and in PyTorch, fp32.

A worker runs ``steps`` optimizer steps whenever it is told to, and answers with their losses and times and its peak memory.
Steps before them are not timed: while the others had their turn, its memory and threads went cold.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from toolkit.benchmark.side import ROOT, serve

Sizes = dict[str, Any]
Batch = dict[str, np.ndarray]
CONFIG = ROOT / "configs" / "llama2" / "pretrain_llama2_tiny.yaml"
LEARNING_RATE = 1e-3
MAX_GRAD_NORM = 1.0
WARM_UP_STEPS = 2
DIFFERENT_BATCHES = 4  # they come again and again: a loss that falls says more than one that stays


def batches(sizes: Sizes) -> Iterator[Batch]:
    """Endless batches of random tokens, the same for every side."""
    shape = (sizes["batch"], sizes["seq"] + 1)
    random = np.random.default_rng(0)
    tokens = [random.integers(0, sizes["vocab"], shape).astype(np.int32) for _ in range(DIFFERENT_BATCHES)]
    for step in count():
        rows = tokens[step % DIFFERENT_BATCHES]
        mask = np.ones((sizes["batch"], sizes["seq"]), np.float32)
        yield {"input_ids": rows[:, :-1], "labels": rows[:, 1:], "loss_mask": mask}


def rounds(sizes: Sizes, step: Callable[[Batch], float | None]) -> Callable[[], dict[str, Any]]:
    """Turns ``step``, one optimizer step that returns the loss if it has one, into the function a worker answers with."""
    stream = batches(sizes)

    def run() -> dict[str, Any]:
        losses: list[float] = []
        seconds: list[float] = []
        for _ in range(WARM_UP_STEPS + sizes["steps"]):
            batch = next(stream)
            start = time.perf_counter()
            loss = step(batch)
            seconds.append(time.perf_counter() - start)
            losses += [] if loss is None else [loss]
        peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        warm = seconds[WARM_UP_STEPS:]
        return {"losses": losses, "seconds": warm, "first_s": seconds[0], "all_s": sum(seconds), "peak_mb": peak_mb}

    return run


def mindllm_side(sizes: Sizes, fused: bool) -> Callable[[], dict[str, Any]]:
    """The engine of ``run_llm.py``, with or without graph-kernel fusion; leaves its initial weights for PyTorch."""
    from mindllm.config import load_config
    from mindllm.train.device import prepare_environment, set_up_device

    changes = {
        "model.model_config.vocab_size": sizes["vocab"],
        "model.model_config.hidden_size": sizes["hidden"],
        "model.model_config.num_layers": sizes["layers"],
        "model.model_config.num_heads": sizes["heads"],
        "model.model_config.n_kv_heads": sizes["kv_heads"],
        "model.model_config.intermediate_size": sizes["intermediate"],
        "model.model_config.seq_length": sizes["seq"],
        "runner_config.batch_size": sizes["batch"],
        "runner_wrapper.max_grad_norm": MAX_GRAD_NORM,
        "context.enable_graph_kernel": fused,
        "context.compile_cache_path": f"{sizes['directory']}/cache-{fused}",
    }
    config = load_config(CONFIG, changes)
    prepare_environment(config)
    from safetensors.numpy import save_file

    from mindllm.train.engine import ReplicaEngine

    set_up_device(config)
    engine = ReplicaEngine(config)
    weights = Path(sizes["directory"], "weights.safetensors")
    if not weights.exists():
        save_file({name: weight.asnumpy() for name, weight in engine.weights.items()}, weights)
    return rounds(sizes, lambda batch: engine.step(batch, LEARNING_RATE, 1.0).loss)


def torch_side(sizes: Sizes, compiled: bool) -> Callable[[], dict[str, Any]]:
    """PyTorch with its fastest CPU forms: fused attention and fused AdamW."""
    import torch
    from safetensors.torch import load_file
    from torch.nn.functional import cross_entropy

    from mindllm.config import load_config
    from toolkit.benchmark.workers.torch_llama import TorchLlama

    torch.set_num_threads(sizes["threads"])
    model: Any = TorchLlama(sizes)
    model.load_state_dict(load_file(Path(sizes["directory"], "weights.safetensors")))
    options = load_config(CONFIG).optimizer
    decayed = [weight for weight in model.parameters() if weight.ndim > 1]
    others = [weight for weight in model.parameters() if weight.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": options.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=LEARNING_RATE,
        betas=options.betas,
        eps=options.eps,
        fused=True,
    )
    forward = torch.compile(model) if compiled else model

    def step(batch: Batch) -> float:
        tokens = torch.from_numpy(batch["input_ids"].astype(np.int64))
        labels = torch.from_numpy(batch["labels"].astype(np.int64))
        loss = cross_entropy(forward(tokens).flatten(0, 1), labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss)

    return rounds(sizes, step)


def products_side(sizes: Sizes) -> Callable[[], dict[str, Any]]:
    """The products with weights alone, forward and the two of backward, in PyTorch: what no implementation gets below.

    (Not with other products, that is. They are nearly all of the arithmetic, and attention's are left out.)
    """
    import torch

    torch.set_num_threads(sizes["threads"])
    tokens, hidden, inner = sizes["batch"] * sizes["seq"], sizes["hidden"], sizes["intermediate"]
    kv_width = hidden // sizes["heads"] * sizes["kv_heads"]
    layer = [(hidden, hidden), (hidden, kv_width), (hidden, kv_width), (hidden, hidden)]
    layer += [(hidden, inner), (hidden, inner), (inner, hidden)]
    shapes = layer * sizes["layers"] + [(hidden, sizes["vocab"])]
    operands = [(torch.randn(tokens, i), torch.randn(o, i), torch.randn(tokens, o)) for i, o in shapes]

    def step(batch: Batch) -> None:
        for x, weight, gradient in operands:
            x @ weight.T
            gradient @ weight
            gradient.T @ x

    return rounds(sizes, step)


SIDES = {
    "mindllm": lambda sizes: mindllm_side(sizes, fused=True),
    "mindllm_unfused": lambda sizes: mindllm_side(sizes, fused=False),
    "torch_eager": lambda sizes: torch_side(sizes, compiled=False),
    "torch_compile": lambda sizes: torch_side(sizes, compiled=True),
    "torch_products": products_side,
}

if __name__ == "__main__":
    serve(SIDES)
