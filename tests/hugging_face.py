"""Hugging Face's Llama with the weights of one of our models."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from mindllm.models.families.llama import HUGGING_FACE
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
            attention_bias=False,
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
