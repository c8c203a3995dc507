"""Multi-head latent attention (DeepSeek-V2, section 2.1) as a value: keys and values from a narrow vector per token.

A head's query and key are a plain part, and a part that rotary positions turn; the latter of the key is one for all heads.
"""

from __future__ import annotations

from dataclasses import dataclass

from mindllm.architecture.parts import FORWARD_AND_BACKWARD, AttentionContext, NormSpec, RotarySpec, Shapes, scalars

LATENT_NORM = NormSpec("rms", 1e-6)
"""Of the narrow vectors: the published code has this epsilon whatever the model's own is."""


@dataclass(frozen=True)
class LatentAttentionSpec:
    """Attributes:
    q_lora_rank: width of the vector that queries are made of; None: they are made of the hidden states.
    kv_lora_rank: of the one that keys and values are made of.
    qk_nope_head_dim, qk_rope_head_dim, value_dim: channels of a head's query and key that are not turned, that are, and of its
    value. scale: multiplies the scores; with the probability ``dropout`` a query does not see a key in training.
    """

    hidden_size: int
    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    value_dim: int
    scale: float
    position: RotarySpec
    dropout: float = 0.0

    window = None
    soft_cap = None

    @property
    def can_be_fused(self) -> bool:
        """Whether the fused kernel of devices computes it; dropout is composed everywhere."""
        return not self.dropout

    @property
    def num_kv_heads(self) -> int:
        """Every query head has keys and values of its own."""
        return self.num_heads

    @property
    def head_dim(self) -> int:
        """Channels of a head's query and key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def context(self) -> AttentionContext:
        """What this attention reads besides hidden states and weights."""
        return AttentionContext(self.position, None, self.qk_rope_head_dim, self.num_heads)

    def matrices(self) -> Shapes:
        """The weights of its matrix products."""
        plain, turned = self.num_heads * self.qk_nope_head_dim, self.num_heads * self.qk_rope_head_dim
        query: Shapes = {"wq_plain.weight": (plain, self.hidden_size), "wq_rotary.weight": (turned, self.hidden_size)}
        if self.q_lora_rank is not None:
            query = {"wq_down.weight": (self.q_lora_rank, self.hidden_size)}
            query |= {
                "wq_up_plain.weight": (plain, self.q_lora_rank),
                "wq_up_rotary.weight": (turned, self.q_lora_rank),
            }
        return {
            **query,
            "wkv_down.weight": (self.kv_lora_rank, self.hidden_size),
            "wk_rotary.weight": (self.qk_rope_head_dim, self.hidden_size),
            "wk_plain.weight": (plain, self.kv_lora_rank),
            "wv.weight": (self.num_heads * self.value_dim, self.kv_lora_rank),
            "wo.weight": (self.hidden_size, self.num_heads * self.value_dim),
        }

    def weights(self) -> Shapes:
        """All weights."""
        query = {} if self.q_lora_rank is None else {"query_latent_norm.weight": (self.q_lora_rank,)}
        return {**self.matrices(), **query, "key_value_latent_norm.weight": (self.kv_lora_rank,)}

    def flops_per_token(self, seq_length: int) -> float:
        """Forward and backward: weights, and scores and contexts of a sequence, not halved for the causal mask."""
        of_sequence = self.num_heads * (self.head_dim + self.value_dim) * seq_length
        return FORWARD_AND_BACKWARD * (scalars(self.matrices()) + of_sequence)
