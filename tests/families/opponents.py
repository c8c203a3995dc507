"""The other side of parity: a tiny random model of every family, from ``transformers`` or the references beside this file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from references import REFERENCES, random_tiny
from tiny_families import TINY
from transformers import AutoConfig, AutoModelForCausalLM

NAMES = [*TINY, *REFERENCES]
SPREAD = 0.3  # of random weights: large enough that logits differ clearly
SMALLER = 0.2  # are embeddings that are the head, too


@dataclass(frozen=True)
class Opponent:
    """A model of PyTorch that has been written to a directory."""

    name: str
    directory: Path
    model: Any

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        found = self.model(tokens)
        return getattr(found, "logits", found)

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """The most likely tokens, each from the whole text anew."""
        text = torch.tensor([prompt])
        with torch.inference_mode():
            for _ in range(count):
                text = torch.cat([text, self.logits(text)[:, -1:].argmax(-1)], 1)
        return text[0, len(prompt) :].tolist()

    def gradients(self) -> dict[str, torch.Tensor]:
        found = {name: item.grad for name, item in self.model.named_parameters() if item.grad is not None}
        return {name: item for key, grad in found.items() for name, item in self.by_expert(key, grad).items()}

    def by_expert(self, name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
        """The names of files for what ``transformers`` holds for all experts together."""
        mixtral = self.name.startswith("mixtral")
        below = name.replace(".mlp.", ".block_sparse_moe.") if mixtral else name
        gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
        if name.endswith("experts.gate_up_proj"):
            stem, parts = below.removesuffix("gate_up_proj"), {gate: value.chunk(2, 1)[0], up: value.chunk(2, 1)[1]}
        elif name.endswith("experts.down_proj"):
            stem, parts = below.removesuffix("down_proj"), {down: value}
        else:
            return {below: value}
        return {
            f"{stem}{expert}.{part}.weight": tensor[expert]
            for part, tensor in parts.items()
            for expert in range(len(tensor))
        }


def opponent(name: str, directory: Path) -> Opponent:
    """Writes the tiny model ``name`` into ``directory``, which does not exist yet."""
    if name in REFERENCES:
        model = random_tiny(name)
        model.save(directory)
        return Opponent(name, directory, model)
    torch.manual_seed(0)
    content = dict(TINY[name])
    config = AutoConfig.for_model(content.pop("model_type"), **content)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    model.get_input_embeddings().padding_idx = None
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            ones = parameter.ndim == 1 and key.endswith("weight") and not key_adds_one(content, key)
            torch.nn.init.normal_(parameter, mean=float(ones), std=SPREAD if parameter.ndim == 1 else SPREAD / 2)
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.normal_(std=SPREAD)
        if config.tie_word_embeddings:  # or every model says its last token again
            model.get_input_embeddings().weight.mul_(SMALLER)
    model.save_pretrained(directory)
    return Opponent(name, directory, model)


def key_adds_one(content: dict[str, Any], key: str) -> bool:
    """Norms of Gemma are around zero."""
    return "hidden_activation" in content and "norm" in key


def load(directory: Path) -> Any:
    """What ``transformers`` makes of a directory."""
    return AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()
