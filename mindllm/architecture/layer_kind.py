"""The kind of a layer: its specification and its recomputation. Layers of one kind take the same time and memory."""

from __future__ import annotations

from dataclasses import dataclass

from mindllm.architecture.layer import LayerSpec

FULL, SELECT, COMMUNICATION, BOTH, NONE = "full", "select", "comm", "both", "none"


@dataclass(frozen=True)
class LayerKind:
    """What a layer is and how it is recomputed.

    Attributes:
        recompute: whether the whole layer is recomputed.
        patterns: by key of ``recompute_config``, the operator patterns that apply to it; keys and patterns are sorted.
        spec: None where all layers of the model are alike.
    """

    recompute: bool = False
    patterns: tuple[tuple[str, tuple[str, ...]], ...] = ()
    spec: LayerSpec | None = None

    @property
    def name(self) -> str:
        """Return ``full``, ``select``, ``comm``, ``both`` (of the latter two) or ``none``, and the layer if specifications
        differ.
        """
        return self.recomputation if self.spec is None else f"{self.recomputation} ({self.spec.name})"

    @property
    def recomputation(self) -> str:
        """Return the first word of the name."""
        keys = {key for key, _ in self.patterns}
        if self.recompute:
            return FULL
        if {"select_recompute", "select_comm_recompute"} <= keys:
            return BOTH
        return SELECT if "select_recompute" in keys else COMMUNICATION if "select_comm_recompute" in keys else NONE

    @property
    def is_mtp(self) -> bool:
        """Return True for a multi-token prediction layer, one of the last layers of the last stage."""
        return self.spec is not None and self.spec.is_mtp
