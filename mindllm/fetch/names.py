"""Where the weights of shipped models are published, on Hugging Face's hub and on ModelScope.

Those whose place is not known for certain are not here.
"""

from __future__ import annotations

PUBLISHED = {
    "llama2_7b": "meta-llama/Llama-2-7b-hf",
    "llama2_13b": "meta-llama/Llama-2-13b-hf",
    "llama2_70b": "meta-llama/Llama-2-70b-hf",
    "llama3_8b": "meta-llama/Meta-Llama-3-8B",
    "llama3_70b": "meta-llama/Meta-Llama-3-70B",
    "llama3_1_8b": "meta-llama/Llama-3.1-8B",
    "llama3_1_70b": "meta-llama/Llama-3.1-70B",
    "llama3_2_1b": "meta-llama/Llama-3.2-1B",
    "llama3_2_3b": "meta-llama/Llama-3.2-3B",
    "codellama_34b": "codellama/CodeLlama-34b-hf",
    "mistral_7b": "mistralai/Mistral-7B-v0.1",
    "mixtral_8x7b": "mistralai/Mixtral-8x7B-v0.1",
    "qwen1_5_7b": "Qwen/Qwen1.5-7B",
    "qwen1_5_14b": "Qwen/Qwen1.5-14B",
    "qwen2_5_0_5b": "Qwen/Qwen2.5-0.5B",
    "qwen2_5_1_5b": "Qwen/Qwen2.5-1.5B",
    "qwen2_5_3b": "Qwen/Qwen2.5-3B",
    "qwen2_5_7b": "Qwen/Qwen2.5-7B",
    "qwen2_5_14b": "Qwen/Qwen2.5-14B",
    "qwen2_5_32b": "Qwen/Qwen2.5-32B",
    "qwen2_5_72b": "Qwen/Qwen2.5-72B",
    "qwen2_moe_57b": "Qwen/Qwen2-57B-A14B",
    "qwen3_0_6b": "Qwen/Qwen3-0.6B",
    "qwen3_1_7b": "Qwen/Qwen3-1.7B",
    "qwen3_4b": "Qwen/Qwen3-4B",
    "qwen3_8b": "Qwen/Qwen3-8B",
    "qwen3_14b": "Qwen/Qwen3-14B",
    "qwen3_32b": "Qwen/Qwen3-32B",
    "qwen3_moe_30b_a3b": "Qwen/Qwen3-30B-A3B",
    "qwen3_moe_235b_a22b": "Qwen/Qwen3-235B-A22B",
    "gemma_7b": "google/gemma-7b",
    "gemma2_2b": "google/gemma-2-2b",
    "gemma2_9b": "google/gemma-2-9b",
    "gemma2_27b": "google/gemma-2-27b",
    "gemma3_1b": "google/gemma-3-1b-pt",
    "yi_6b": "01-ai/Yi-6B",
    "yi_34b": "01-ai/Yi-34B",
    "gpt2": "openai-community/gpt2",
    "gpt2_medium": "openai-community/gpt2-medium",
    "gpt2_large": "openai-community/gpt2-large",
    "gpt2_xl": "openai-community/gpt2-xl",
    "bloom_7b1": "bigscience/bloom-7b1",
    "deepseek_v2_lite": "deepseek-ai/DeepSeek-V2-Lite",
    "deepseek_v2_236b": "deepseek-ai/DeepSeek-V2",
}

KEEPS_ITS_NAMES = ("Qwen/", "deepseek-ai/")
"""Organisations that publish on ModelScope under the names they have on Hugging Face's hub."""
PUBLISHED_ON_MODELSCOPE = {
    name: repository for name, repository in PUBLISHED.items() if repository.startswith(KEEPS_ITS_NAMES)
}
