"""The side of transformers and PEFT in :mod:`toolkit.benchmark.all_the_way`: ``python -m … generate|logits MODEL PROMPT``."""

from __future__ import annotations

import sys

TOKENS = 24


def generate(directory: str, prompt: str) -> None:
    """Writes the greedy answer of a model directory."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    asked = [{"role": "user", "content": prompt}]
    inputs = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.inference_mode():
        ids = model.generate(**inputs, max_new_tokens=TOKENS, do_sample=False)
    sys.stdout.write(tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True) + "\n")


def logits(directory: str, prompt: str) -> None:
    """Writes how far the base with the adapter is from the merged model; both are written beside each other."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ids = AutoTokenizer.from_pretrained(directory)(prompt, return_tensors="pt")["input_ids"]
    base = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.inference_mode():
        before = base(ids).logits
        beside = PeftModel.from_pretrained(base, "adapter")(ids).logits
        merged = AutoModelForCausalLM.from_pretrained("merged", dtype=torch.float32)(ids).logits
    apart, moved = (float((one - other).abs().max()) for one, other in ((beside, merged), (beside, before)))
    sys.stdout.write(f"logits of adapter and merged model within {apart:.1e}; tuning moved them by up to {moved:.2f}\n")


if __name__ == "__main__":
    {"generate": generate, "logits": logits}[sys.argv[1]](*sys.argv[2:])
