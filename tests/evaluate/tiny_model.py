"""Tiny models with a tokenizer whose tokens are characters."""

import torch
from character_tokenizer import LENGTH, write_tokenizer
from tiny_families import TINY
from transformers import AutoConfig, AutoModelForCausalLM


def write_model(directory, name="llama", seed=0, **changes):
    """A random tiny model of a family with the tokenizer, as a directory of Hugging Face."""
    torch.manual_seed(seed)
    content = dict(TINY[name]) | {"bos_token_id": None, "eos_token_id": 96, "pad_token_id": None} | changes
    for key in ("max_position_embeddings", "n_positions", "seq_length"):
        if key in content:
            content[key] = LENGTH
    config = AutoConfig.for_model(content.pop("model_type"), **content)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.1)
    model.generation_config.eos_token_id = 96
    model.save_pretrained(directory)
    write_tokenizer(directory)
    return directory
