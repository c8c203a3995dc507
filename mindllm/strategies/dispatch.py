"""The dispatch of tokens to experts in a strategy: the forms that a search tries, and their effect on the computation."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from mindllm.architecture.experts import ALLGATHER, ALLTOALL, DISPATCHES, PLACES
from mindllm.config import RunConfig
from mindllm.errors import Problem, UserError, nearest

SECTION = "model.model_config"
CAPACITY, GROUPED, DISPATCHER = (
    f"{SECTION}.{key}" for key in ("capacity_factor", "moe_grouped_gemm", "moe_token_dispatcher_type")
)


@dataclass(frozen=True)
class Dispatch:
    """The way of tokens to their experts.

    Attributes:
        capacity_factor: bound on the tokens of an expert; None: no token is dropped.
        grouped: tokens are sorted, and the products of all experts are one grouped product.
        sends: sorted tokens are sent to the ranks of their experts; otherwise these ranks gather the tokens of all.
    """

    capacity_factor: float | None = None
    grouped: bool = False
    sends: bool = False

    def keys(self) -> dict[str, object]:
        """Return the keys of the run YAML."""
        return {
            CAPACITY: self.capacity_factor,
            GROUPED: self.grouped,
            DISPATCHER: ALLTOALL if self.sends else ALLGATHER,
        }

    @property
    def form(self) -> str:
        """The form as ``DISPATCHES`` names it."""
        return PLACES if not self.grouped else ALLTOALL if self.sends else ALLGATHER

    def suffix(self, groups: int) -> str:
        """Return the part of a strategy's name; with a single group of ranks nothing is exchanged."""
        if not self.grouped:
            return ""
        return " grouped" if groups == 1 else f" {self.form}"


DENSE_DISPATCH = Dispatch()
"""The dispatch of a dense model."""


def run_dispatch(config: RunConfig) -> Dispatch:
    """Return the dispatch of a run."""
    model = config.model.config
    if model.expert_num == 1:
        return DENSE_DISPATCH
    return Dispatch(model.capacity_factor, model.moe_grouped_gemm, config.sends_tokens)


def check_forms(config: RunConfig, requested: Collection[str]) -> None:
    """Raise UserError if a form of dispatch is unknown, or if the model has no experts."""
    for form in requested:
        if form not in DISPATCHES:
            message = f"unknown dispatch of experts (value {form!r}){nearest(form, DISPATCHES)}"
            raise UserError.of(Problem(None, ("dispatch",), message, form))
    if requested and config.model.config.expert_num == 1:
        message = "the model has no experts; leave it out"
        raise UserError.of(Problem(None, ("dispatch",), message, list(requested)))


def dispatches(config: RunConfig, groups: int, requested: Collection[str]) -> list[Dispatch]:
    """Return the forms to try with ``groups`` of ranks that share experts.

    Empty ``requested``: the forms that compute the same as the run. Fixed places without a capacity are excluded, because
    grouped products yield the same without computing places that no token takes.
    """
    model = config.model.config
    forms = requested or ((ALLTOALL, ALLGATHER) if model.capacity_factor is None else (PLACES,))
    tried = (
        Dispatch(model.capacity_factor)
        if form == PLACES
        else Dispatch(grouped=True, sends=form == ALLTOALL and groups > 1)  # a single group exchanges nothing
        for form in forms
    )
    return list(dict.fromkeys(tried))


def with_dispatch(config: RunConfig, dispatch: Dispatch) -> RunConfig:
    """Return the run with another dispatch, unchecked: its own sizes of the mesh may not allow it."""
    if config.model.config.expert_num == 1:
        return config
    keys = {key.removeprefix(f"{SECTION}."): value for key, value in dispatch.keys().items()}
    model = config.model.config.model_copy(update=keys)
    return config.model_copy(update={"model": config.model.model_copy(update={"config": model})})


def dispatch_changes(before: RunConfig, after: RunConfig) -> dict[str, tuple[object, object]]:
    """Return the keys of dispatch that differ between two runs, with both values."""
    if before.model.config.expert_num == 1:
        return {}
    former, new = (_values(config) for config in (before, after))
    return {key: (former[key], new[key]) for key in former if former[key] != new[key]}


def computes_the_same(before: RunConfig, after: RunConfig) -> bool:
    """Return True if the dispatch of both runs drops the same tokens."""
    return before.model.config.capacity_factor == after.model.config.capacity_factor


def describe_changes(before: RunConfig, after: RunConfig) -> Iterator[str]:
    """Yield a line about changed keys of dispatch and their effect on the computation."""
    changes = dispatch_changes(before, after)
    if not changes:
        return
    keys = ", ".join(f"{key} {_text(former)} -> {_text(new)}" for key, (former, new) in changes.items())
    if computes_the_same(before, after):
        effect = "both drop the same tokens, if any, so the run computes the same"
    elif after.model.config.capacity_factor is None:
        effect = "no token is dropped any more, so the run computes something different from the configuration"
    else:
        effect = (
            "tokens beyond the capacity are dropped, so the run computes something different from the configuration"
        )
    yield f"dispatch of experts: {keys}; {effect}"


def _values(config: RunConfig) -> dict[str, object]:
    model = config.model.config
    return {key: getattr(model, key.removeprefix(f"{SECTION}.")) for key in (CAPACITY, GROUPED, DISPATCHER)}


def _text(value: object) -> str:
    return json.dumps(value).strip('"')
