"""Hugging Face's Llama: with the weights of one of our models, and as a directory of random ones."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from mindllm.families.llama import WEIGHTS as HUGGING_FACE
from mindllm.models.weights import trained_weights

# name -> (what our configuration says, what theirs says)
ROPE_SCALINGS = {
    "linear": ({"type": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
    "llama3": (
        {"type": "llama3", "factor": 8.0, "original_max_position_embeddings": 32},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
}
TINY = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
}
# What a directory may be, as changes of TINY.
LLAMAS = {
    "multi-head": {"num_key_value_heads": 4, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
    "grouped, wide heads": {"head_dim": 16, "rms_norm_eps": 1e-5},
    "tied": {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "biased": {"attention_bias": True},
    "linear": {"rope_parameters": {"rope_theta": 1e4, **ROPE_SCALINGS["linear"][1]}},
    "llama3": {"rope_parameters": {"rope_theta": 5e5, **ROPE_SCALINGS["llama3"][1]}, "tie_word_embeddings": True},
}


def random_llama(seed=0, std=0.3, **changes):
    """A tiny ``LlamaForCausalLM`` whose every weight is random, biases and norms too, and large enough for clear choices."""
    torch.manual_seed(seed)
    llama = LlamaForCausalLM(LlamaConfig(**{**TINY, **changes})).eval()
    with torch.no_grad():
        for parameter in llama.parameters():
            torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=std)
    return llama


def save_llama(directory, dtype=torch.float32, max_shard_size="5GB", **changes):
    """Writes a :func:`random_llama` as a directory of Hugging Face; returns the model as it is there."""
    llama = random_llama(**changes).to(dtype)
    llama.save_pretrained(directory, max_shard_size=max_shard_size)
    return llama


def hugging_face_llama(model, config, scaling=None):
    """``LlamaForCausalLM`` in evaluation mode; ``scaling`` is their half of a rotary scaling."""
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.n_kv_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.rms_norm_eps,
            max_position_embeddings=config.seq_length,
            tie_word_embeddings=config.tie_word_embeddings,
            attention_bias=config.qkv_has_bias,
            rope_parameters={"rope_theta": config.theta, **(scaling or {"rope_type": "default"})},
            eos_token_id=None,
            bos_token_id=None,
            pad_token_id=0,
        )
    ).eval()
    llama.get_input_embeddings().padding_idx = None  # the padding token learns like any other
    tensors = {
        HUGGING_FACE.theirs(name): torch.from_numpy(parameter.asnumpy().copy())
        for name, parameter in trained_weights(model).items()
    }
    missing = llama.load_state_dict(tensors, strict=False)
    assert not missing.unexpected_keys
    assert set(missing.missing_keys) <= ({"lm_head.weight"} if config.tie_word_embeddings else set())
    return llama
