"""The architecture of a decoder: embedding, a list of layers, final norm, head. Its weights and FLOPs are counted.

FLOPs follow PaLM (Chowdhery et al. 2022, appendix B: 6N + 12 L H Q T) and Megatron-LM (Narayanan et al. 2021, appendix,
without its recomputation pass): a multiply-add is 2 FLOPs, the backward pass is twice the forward, attention is counted
over the whole sequence or window (NOT halved for the causal mask); embedding lookup, norms, biases and softmax are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from mindllm.architecture.layer import LayerSpec
from mindllm.architecture.parts import FORWARD_AND_BACKWARD, GRADIENT, AttentionContext, NormSpec, Shapes, scalars
from mindllm.architecture.tuners import Tuning, is_trained

EMBEDDING, HEAD = "model.tok_embeddings.embedding_weight", "lm_head.weight"


@dataclass(frozen=True)
class EmbeddingSpec:
    """Token embeddings, multiplied by ``scale``, plus learned positions, normalized: each step is optional.

    ``learned_positions`` is the number of rows. ``dropout`` applies to the result, ``noise`` in training to the token embeddings
    (NEFTune).
    """

    scale: float | None = None
    learned_positions: int | None = None
    norm: NormSpec | None = None
    dropout: float = 0.0
    noise: float | None = None


@dataclass(frozen=True)
class HeadSpec:
    """Logits. ``tied``: the weight is the embedding table; ``normalised``: its rows are divided by their lengths (NormHead of
    Baichuan 2); ``soft_cap`` bounds the logits by ``cap · tanh(logit / cap)``.
    """

    tied: bool = False
    normalised: bool = False
    soft_cap: float | None = None


@dataclass(frozen=True)
class Architecture:
    """A decoder: everything that decides its weights and its computation. ``pet``: which weights are trained.

    The last of ``layers`` may be multi-token prediction layers.
    """

    vocab_size: int
    hidden_size: int
    embedding: EmbeddingSpec
    layers: tuple[LayerSpec, ...]
    final_norm: NormSpec
    head: HeadSpec
    pet: Tuning | None = None

    def specifications(self) -> tuple[LayerSpec, ...]:
        """Return the different specifications of layers, in the order in which they first appear."""
        return tuple(self.layers[number] for number in dict.fromkeys(self.specification_numbers))

    @cached_property
    def specification_numbers(self) -> tuple[int, ...]:
        """Return for every layer the index of the first equal layer, ``[layers]``: cheaper to compare than layers."""
        first: dict[LayerSpec, int] = {}
        return tuple(first.setdefault(layer, number) for number, layer in enumerate(self.layers))

    @property
    def main_layers(self) -> tuple[LayerSpec, ...]:
        """Return the layers between embedding and head, without multi-token prediction layers."""
        return tuple(layer for layer in self.layers if not layer.is_mtp)

    @property
    def predictions(self) -> int:
        """Return the number of multi-token prediction layers."""
        return len(self.layers) - len(self.main_layers)

    @property
    def drops(self) -> bool:
        """Return True if training needs random numbers."""
        embedding = self.embedding.dropout > 0 or self.embedding.noise is not None
        return embedding or any(spec.drops for spec in self.specifications())

    def contexts(self) -> tuple[AttentionContext, ...]:
        """Return the distinct tables and masks that layers read, in order of first use."""
        return tuple(dict.fromkeys(layer.attention.context for layer in self.layers))

    def weight_shapes(self) -> Shapes:
        """Return the shape of every weight by name, in the order of layers, as ``trained_weights`` of the built model."""
        table, shapes = (self.vocab_size, self.hidden_size), Shapes()
        shapes[EMBEDDING] = table
        if self.embedding.learned_positions is not None:
            shapes["model.position_embeddings.embedding_weight"] = (
                self.embedding.learned_positions,
                self.hidden_size,
            )
        if self.embedding.norm is not None:
            shapes |= _below("model.embedding_norm", self.embedding.norm.weights(self.hidden_size))
        for number, layer in enumerate(self.layers):
            shapes |= _below(f"model.layers.{number}", layer.weights())
        shapes |= _below("model.norm_out", self.final_norm.weights(self.hidden_size))
        return shapes if self.head.tied else {**shapes, HEAD: table}

    @property
    def head_weight(self) -> str:
        """Return the name of the weight of the output head."""
        return EMBEDDING if self.head.tied else HEAD

    def trained_shapes(self) -> Shapes:
        """Return the shapes of trained weights."""
        frozen = {f"model.layers.{n}.{name}" for n, layer in enumerate(self.layers) for name in layer.frozen}
        return {
            name: shape
            for name, shape in self.weight_shapes().items()
            if name not in frozen and (name.startswith("model.layers.") or is_trained(self.pet, name))
        }

    def parameter_count(self) -> int:
        """Return the exact number of parameters, including adapters and frozen weights."""
        return scalars(self.weight_shapes())

    def trained_parameter_count(self) -> int:
        """Return the exact number of trained parameters."""
        return scalars(self.trained_shapes())

    def active_parameter_count(self) -> int:
        """Return the parameters used per token: all except those of experts that are not chosen."""
        idle = (scalars(layer.feed_forward.weights()) - layer.feed_forward.active_parameters() for layer in self.layers)
        return self.parameter_count() - sum(idle)

    def flops_per_token(self, seq_length: int) -> float:
        """Return the model FLOPs of forward and backward per token, for sequences of ``seq_length``."""
        trained = is_trained(self.pet, self.head_weight)
        head = (FORWARD_AND_BACKWARD - (0 if trained else GRADIENT)) * self.vocab_size * self.hidden_size
        return head * (1 + self.predictions) + sum(layer.flops_per_token(seq_length) for layer in self.layers)


def _below(path: str, shapes: Shapes) -> Shapes:
    return {f"{path}.{name}": shape for name, shape in shapes.items()}
