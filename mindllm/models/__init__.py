"""Single-device mathematics of the models as graph-mode cells: no ranks, no device counts, no sharding."""

from mindllm.models.causal_lm import CausalLM, build_model
from mindllm.models.kernels import Kernels

__all__ = ["CausalLM", "Kernels", "build_model"]
