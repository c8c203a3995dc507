"""Parameters against published architectures, exactly; FLOPs against the formulas of the papers."""

import pytest

from mindllm.config import ModelConfig

# Name: parameters, layers, hidden, feed-forward, heads, key/value heads, head width, vocabulary, bias on q k v, tied head.
# Sizes from the public config.json files, litgpt/config.py and mlc-llm's presets.
PUBLISHED = {
    "Aquila-7B": (7295537152, 32, 4096, 11008, 32, 32, 128, 100008, False, False),
    "Baichuan-7B": (7000559616, 32, 4096, 11008, 32, 32, 128, 64000, False, False),
    "Baichuan-13B": (13264901120, 40, 5120, 13696, 40, 40, 128, 64000, False, False),
    "Baichuan2-7B": (7505973248, 32, 4096, 11008, 32, 32, 128, 125696, False, False),
    "Baichuan2-13B": (13896668160, 40, 5120, 13696, 40, 40, 128, 125696, False, False),
    "CodeLlama-34B": (33743970304, 48, 8192, 22016, 64, 8, 128, 32000, False, False),
    "LLaMA-7B": (6738415616, 32, 4096, 11008, 32, 32, 128, 32000, False, False),
    "LLaMA-13B": (13015864320, 40, 5120, 13824, 40, 40, 128, 32000, False, False),
    "LLaMA-33B": (32528943616, 60, 6656, 17920, 52, 52, 128, 32000, False, False),
    "LLaMA-65B": (65285660672, 80, 8192, 22016, 64, 64, 128, 32000, False, False),
    "LLaMA2-70B": (68976648192, 80, 8192, 28672, 64, 8, 128, 32000, False, False),
    "LLaMA3-8B": (8030261248, 32, 4096, 14336, 32, 8, 128, 128256, False, False),
    "LLaMA3-70B": (70553706496, 80, 8192, 28672, 64, 8, 128, 128256, False, False),
    "Qwen-1.8B": (1836828672, 24, 2048, 5504, 16, 16, 128, 151936, True, False),
    "Qwen-7B": (7721324544, 32, 4096, 11008, 32, 32, 128, 151936, True, False),
    "Qwen-14B": (14167290880, 40, 5120, 13696, 40, 40, 128, 152064, True, False),
    "Qwen-72B": (72287920128, 80, 8192, 24576, 64, 64, 128, 152064, True, False),
    "Yi-6B": (6061035520, 32, 4096, 11008, 32, 4, 128, 64000, False, False),
    "Yi-34B": (34388917248, 60, 7168, 20480, 56, 8, 128, 64000, False, False),
    "Mistral-7B": (7241732096, 32, 4096, 14336, 32, 8, 128, 32000, False, False),
    "Gemma-7B": (8537680896, 28, 3072, 24576, 16, 16, 256, 256000, False, True),
    "ChatGLM3-6B": (6243584000, 28, 4096, 13696, 32, 2, 128, 65024, True, False),
}


def published(name: str) -> tuple[int, ModelConfig]:
    parameters, layers, hidden, width, heads, kv_heads, head_dim, vocabulary, bias, tied = PUBLISHED[name]
    config = ModelConfig(
        vocab_size=vocabulary, hidden_size=hidden, num_layers=layers, num_heads=heads, n_kv_heads=kv_heads, head_dim=head_dim,
        intermediate_size=width, seq_length=2048, qkv_has_bias=bias, tie_word_embeddings=tied,
    )  # fmt: skip
    return parameters, config


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_of_published_models(name):
    parameters, config = published(name)
    assert config.parameter_count() == parameters


@pytest.mark.parametrize(
    ("hidden_size", "multiple_of", "ffn_dim_multiplier", "width"),
    [
        (4096, 256, None, 11008),
        (5120, 256, None, 13824),
        (6656, 256, None, 17920),
        (8192, 256, None, 22016),
        (8192, 4096, 1.3, 28672),
        (4096, 1024, 1.3, 14336),
        (256, 8, None, 688),
    ],
)
def test_default_width_is_that_of_the_llamas(hidden_size, multiple_of, ffn_dim_multiplier, width):
    config = ModelConfig(
        vocab_size=1, hidden_size=hidden_size, num_layers=1, num_heads=1, seq_length=1,
        multiple_of=multiple_of, ffn_dim_multiplier=ffn_dim_multiplier,
    )  # fmt: skip
    assert config.intermediate_size == width


def test_flops_are_those_of_megatron():
    """Narayanan et al. 2021: 72 B s l h^2 (1 + s / 6h + V / 12 l h) without recomputation, for a width of 4h and two matrices.

    Two matrices of 4h are as much as three of 8h/3.
    """
    hidden, layers, vocabulary, length = 768, 12, 1000, 512
    config = ModelConfig(
        vocab_size=vocabulary, hidden_size=hidden, num_layers=layers, num_heads=12, intermediate_size=8 * hidden // 3,
        seq_length=length,
    )  # fmt: skip
    expected = 72 * layers * hidden**2 * (1 + length / (6 * hidden) + vocabulary / (12 * layers * hidden))
    assert config.flops_per_token() == pytest.approx(expected, rel=1e-12)


def test_flops_are_those_of_palm():
    """Chowdhery et al. 2022, appendix B: 6 N + 12 L H Q T, with N the weights of matrix products."""
    parameters, config = published("LLaMA2-70B")
    weights = parameters - 32000 * 8192 - (2 * 80 + 1) * 8192
    assert config.flops_per_token(4096) == 6 * weights + 12 * 80 * 64 * 128 * 4096


def test_attention_grows_with_the_sequence():
    _, config = published("LLaMA-7B")
    attention = 12 * 32 * 32 * 128
    assert config.flops_per_token(1000) - config.flops_per_token(500) == 500 * attention
