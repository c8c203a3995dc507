"""The other side of parity: a tiny random model of every family, from ``transformers`` or the references beside this file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from references import REFERENCES, random_tiny
from transformers import AutoConfig, AutoModelForCausalLM

from mindllm.config.families import FAMILIES

TINY = {name: content for family in FAMILIES for name, content in family.tiny.items()}
NAMES = [*TINY, *REFERENCES]
SPREAD = 0.3  # of random weights: large enough that logits differ clearly


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
        return {name: item.grad for name, item in self.model.named_parameters() if item.grad is not None}


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
    model.save_pretrained(directory)
    return Opponent(name, directory, model)


def key_adds_one(content: dict[str, Any], key: str) -> bool:
    """Norms of Gemma are around zero."""
    return "hidden_activation" in content and "norm" in key


def load(directory: Path) -> Any:
    """What ``transformers`` makes of a directory."""
    return AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()
