"""Limits of a strategy that apply whatever it would gain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from mindllm.architecture.experts import PLACES
from mindllm.architecture.layer_kind import FULL, NONE, SELECT, LayerKind
from mindllm.parallel.layer_plan import make_plan
from mindllm.planning.costs.formula import KINDS

if TYPE_CHECKING:
    from mindllm.config import RunConfig
    from mindllm.strategies.candidates import Candidate


@dataclass(frozen=True)
class Constraints:
    """Limits of a search; the default limits nothing.

    Attributes:
        most_tensor: tensor-parallel ranks at most; None: those of a node.
        most_stages: pipeline stages at most.
        recompute_attention: whether attention may be recomputed. False: layers keep everything, or recompute the elementwise
            product of their feed-forward.
        tokens_per_second: of all devices together, at least.
        dispatch: dispatch forms of experts to try, of ``DISPATCHES``; empty: the forms that compute the same as the run.
    """

    most_tensor: int | None = None
    most_stages: int | None = None
    recompute_attention: bool = True
    tokens_per_second: float | None = None
    dispatch: tuple[str, ...] = ()

    def refusal(self, candidate: Candidate) -> str:
        """Return the reason to exclude a candidate; empty if there is none."""
        if self.most_tensor is not None and candidate.model_parallel > self.most_tensor:
            return f"over {self.most_tensor} tensor-parallel ranks (excluded by constraints)"
        if self.most_stages is not None and candidate.pipeline_stage > self.most_stages:
            return f"over {self.most_stages} stages (excluded by constraints)"
        return ""

    def admit(self, config: RunConfig, candidate: Candidate) -> bool:
        """Return True if a run as its YAML is, with the strategy ``candidate``, is within the limits."""
        if self.refusal(candidate):
            return False
        single_group = (
            candidate.dispatch.grouped and candidate.expert_parallel == 1
        )  # both grouped forms are equal then
        form = candidate.dispatch.form
        if self.dispatch and form not in self.dispatch and not (single_group and {*self.dispatch} != {PLACES}):
            return False
        return self.recompute_attention or {*make_plan(config).kinds()} <= {*self.kinds.values()}

    @property
    def kinds(self) -> Mapping[str, LayerKind]:
        """The ways in which a layer may recompute, by name."""
        return KINDS if self.recompute_attention else {name: KINDS[name] for name in (NONE, SELECT)}

    @property
    def strongest(self) -> LayerKind:
        """The kind of :attr:`kinds` that keeps least."""
        return self.kinds[FULL if self.recompute_attention else SELECT]

    def tree(self) -> dict[str, Any]:
        """Return the fields as plain values, from which constraints can be rebuilt."""
        return asdict(self)


UNLIMITED = Constraints()
