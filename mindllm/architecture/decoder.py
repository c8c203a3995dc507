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
    """Token embeddings; times ``scale``; plus learned positions (so many rows); through a norm: each where it is not None.

    ``dropout`` is that of the result; ``noise`` the strength of what training adds to the first of these (NEFTune).
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
    """Everything about a decoder that decides its weights and what it computes from tokens; ``pet``: what of it is trained.

    The last of ``layers`` may be those that predict ahead.
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
        """Of every layer the number of the first one that is equal: cheaper to compare than layers are, ``[layers]``."""
        first: dict[LayerSpec, int] = {}
        return tuple(first.setdefault(layer, number) for number, layer in enumerate(self.layers))

    @property
    def main_layers(self) -> tuple[LayerSpec, ...]:
        """The layers through which hidden states go to the head: all but those that predict ahead."""
        return tuple(layer for layer in self.layers if not layer.is_mtp)

    @property
    def predictions(self) -> int:
        """How many layers predict ahead."""
        return len(self.layers) - len(self.main_layers)

    @property
    def drops(self) -> bool:
        """Whether training it needs random numbers."""
        of_embeddings = self.embedding.dropout > 0 or self.embedding.noise is not None
        return of_embeddings or any(spec.drops for spec in self.specifications())

    def contexts(self) -> tuple[AttentionContext, ...]:
        """The different tables and masks that layers read, in the order in which they first appear."""
        return tuple(dict.fromkeys(layer.attention.context for layer in self.layers))

    def weight_shapes(self) -> Shapes:
        """Shape of every weight by its name, in the order of the layers: what ``trained_weights`` of the built model has."""
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
        """Name of the weight that hidden states are multiplied with."""
        return EMBEDDING if self.head.tied else HEAD

    def trained_shapes(self) -> Shapes:
        """Those of :meth:`weight_shapes` that training changes."""
        frozen = {f"model.layers.{n}.{name}" for n, layer in enumerate(self.layers) for name in layer.frozen}
        return {
            name: shape
            for name, shape in self.weight_shapes().items()
            if name not in frozen and (name.startswith("model.layers.") or is_trained(self.pet, name))
        }

    def parameter_count(self) -> int:
        """Number of scalars, exact; adapters are counted, frozen weights too."""
        return scalars(self.weight_shapes())

    def trained_parameter_count(self) -> int:
        """Number of scalars that training changes, exact."""
        return scalars(self.trained_shapes())

    def active_parameter_count(self) -> int:
        """Scalars a token meets: all but those of the experts that are not chosen for it."""
        idle = (scalars(layer.feed_forward.weights()) - layer.feed_forward.active_parameters() for layer in self.layers)
        return self.parameter_count() - sum(idle)

    def flops_per_token(self, seq_length: int) -> float:
        """Model FLOPs of forward and backward for a token in a sequence of ``seq_length``."""
        trained = is_trained(self.pet, self.head_weight)
        head = (FORWARD_AND_BACKWARD - (0 if trained else GRADIENT)) * self.vocab_size * self.hidden_size
        return head * (1 + self.predictions) + sum(layer.flops_per_token(seq_length) for layer in self.layers)


def _below(path: str, shapes: Shapes) -> Shapes:
    return {f"{path}.{name}": shape for name, shape in shapes.items()}
