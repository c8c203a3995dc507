"""The other side of :mod:`toolkit.benchmark.finetune`: the same run by PEFT on a CPU in single precision.

Batches, rates, rank and clipping are those of a run YAML; what it prints is one JSON object.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path

BEGAN = time.perf_counter()


def main() -> None:
    """Train the run of the YAML that the command line names."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from mindllm.config import load_config
    from mindllm.train.batches.datasets import RunData
    from mindllm.train.optimizers.schedule import learning_rates

    config = load_config(Path(sys.argv[1]))
    pet, update = config.model.config.pet_config, config.optimizer
    assert pet is not None
    assert config.lr_schedule is not None
    torch.manual_seed(config.seed)
    data = RunData(config)
    rates = learning_rates(config.lr_schedule, data.total_steps)
    model = AutoModelForCausalLM.from_pretrained(config.load_checkpoint, dtype=torch.float32)
    adapters = LoraConfig(r=pet.lora_rank, lora_alpha=pet.lora_alpha, target_modules="all-linear")
    model = get_peft_model(model, adapters).train()
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, betas=update.betas, eps=update.eps, weight_decay=update.weight_decay)
    evaluator = data.evaluator(config.runner_config.batch_size)
    held_out = list(evaluator.stream)
    before = _held_out(model, held_out)
    losses, seconds, first = [], [], 0.0
    for step in range(config.runner_config.stop_step or data.total_steps):
        begun = time.perf_counter()
        loss, tokens = _loss(model, data.train_stream().batch(step))
        (loss / tokens).backward()
        torch.nn.utils.clip_grad_norm_(weights, config.runner_wrapper.max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = rates(step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item() / tokens)
        seconds.append(time.perf_counter() - begun)
        first = first or time.perf_counter() - BEGAN
    used = resource.getrusage(resource.RUSAGE_SELF)
    found = {
        "first_step": first,
        "losses": losses,
        "seconds": seconds,
        "held_out_before": before,
        "held_out": _held_out(model, held_out),
        "peak_bytes": used.ru_maxrss << 10,
        "processor_seconds": used.ru_utime + used.ru_stime,
    }
    sys.stdout.write(json.dumps(found) + "\n")


def _loss(model, batch):
    """The summed loss of a batch in nats, and its tokens."""
    import torch

    logits = model(input_ids=torch.from_numpy(batch["input_ids"]).long()).logits
    labels, mask = torch.from_numpy(batch["labels"]).long(), torch.from_numpy(batch["loss_mask"])
    each = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return (each * mask.flatten()).sum(), float(mask.sum())


def _held_out(model, batches) -> float:
    import torch

    model.eval()
    with torch.no_grad():
        sums = [_loss(model, batch) for batch in batches]
    model.train()
    return float(sum(loss for loss, _ in sums)) / sum(tokens for _, tokens in sums)


if __name__ == "__main__":
    main()
