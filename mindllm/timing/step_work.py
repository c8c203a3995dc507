"""What a step consists of: the operators and exchanges of every place, and what its stages do once; no device is known yet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from mindllm.architecture.layer import LayerSpec
from mindllm.architecture.tuners import is_trained
from mindllm.parallel.layer_plan import LayerAssignment
from mindllm.timing.costs.coded_update import coded_update
from mindllm.timing.costs.layer import (
    backward_work,
    forward_work,
    in_row_parts,
    is_of_rows,
    pattern_matches,
    repeated_work,
)
from mindllm.timing.costs.orthogonal_update import orthogonal_update
from mindllm.timing.costs.swapped import Moved, moved_results
from mindllm.timing.costs.tuned_update import Seldom, layer_update, step_update
from mindllm.timing.costs.work import Exchange, Operator, Work
from mindllm.timing.non_layer_cost import (
    Held,
    coded_numbers,
    embedding_work,
    head_work,
    of_tokens_ahead,
    place_parameters,
    prediction_work,
    repeated_loss,
    replica_exchanges,
    shared_table,
    sums_of_slices,
    update_operator,
)
from mindllm.timing.workload import Swap, Workload


@dataclass(frozen=True)
class Part:
    """A layer, or an end of the model: its passes for one micro-batch, and what they move to the host and back.

    ``row_parts``: parts of the tokens that operators outside attention are of, and exchange apart from each other.
    """

    forward: Work
    backward: Work
    repeated: Work = ()
    moved: tuple[Moved, ...] = ()
    row_parts: int = 1

    def of_rows(self, outside: bool) -> Part:
        """What it has ``outside`` attention proper, or inside it."""
        forward, backward, repeated = (
            tuple(one for one in work if is_of_rows(one) == outside)
            for work in (self.forward, self.backward, self.repeated)
        )
        return Part(forward, backward, repeated)


@dataclass(frozen=True)
class StageUpdate:
    """Once per step: exchanges between replicas, and the update of what a rank trains of the parameters it holds.

    ``beside``: what its optimizer does beside AdamW.
    """

    parameters: Held
    exchanges: Work
    update: Operator
    beside: tuple[Seldom, ...] = ()


@dataclass(frozen=True)
class StepWork:
    """All that is timed of a step.

    Attributes:
        parts: layers that differ, and the ends, by any key.
        places: how often each place (chunk x stages + stage) has each part.
        sent: bytes of hidden states between stages that every tensor-parallel rank has whole.
        table: the embedding that first and last stage share, sent there and its gradient back once per step.
    """

    workload: Workload
    parts: dict[Hashable, Part]
    places: tuple[Counter[Hashable], ...]
    updates: tuple[StageUpdate, ...]
    sent: Exchange
    table: Exchange | None = None


@lru_cache(maxsize=256)
def step_work(workload: Workload) -> StepWork:
    """Takes a step apart."""
    plan = workload.plan
    numbers = plan.layers_by_place
    keys = [layer_key(workload, number) for number in range(len(plan.layers))]
    parts: dict[Hashable, Part] = {}
    for number, key in enumerate(keys):
        if key not in parts:
            parts[key] = layer_part(workload, number)
    places = [Counter(keys[number] for number in held) for held in numbers]
    architecture = workload.architecture
    frozen = () if is_trained(architecture.pet, architecture.head_weight) else ("lm_head.weight",)
    tokens = _tokens(workload)
    lookup, head = embedding_work(architecture, tokens, workload.strategy), head_work(workload, tokens)
    both = 1 if workload.reference is None else 2
    adds = workload.numerics.adds_gradients
    backward = (*backward_work(head, frozen, adds), *(() if frozen else sums_of_slices(workload)))
    parts["embedding"] = Part(lookup * both, backward_work(lookup))
    parts["head"] = Part(head * both, backward, repeated_loss(workload, tokens))
    places[0]["embedding"] += 1
    places[plan.last_place]["head"] += 1
    updates = []
    for stage in range(plan.stages):
        own = range(stage, len(numbers), plan.stages)
        held = sum((place_parameters(workload, place, numbers[place]) for place in own), Held())
        update = update_operator(held, workload)
        layers = [number for place in own for number in numbers[place]]
        coded = coded_update(coded_numbers(held, workload.strategy), held.coded_weights, workload.update)
        beside = (*_beside(workload, layers), *coded)
        updates.append(StageUpdate(held, replica_exchanges(held, workload), update, beside))
    size = both * workload.numerics.hidden_bytes * tokens * architecture.hidden_size
    sent = Exchange("between stages", "Send", size, "pp")
    return StepWork(workload, parts, tuple(places), tuple(updates), sent, shared_table(workload))


def _beside(workload: Workload, layers: Sequence[int]) -> tuple[Seldom, ...]:
    """What the optimizer of a stage with these layers does beside AdamW."""
    architecture = workload.architecture
    kinds = Counter(architecture.specification_numbers[number] for number in layers)
    of_layers = tuple(
        Seldom(count * one.times, one.work)
        for kind, count in kinds.items()
        for update in (layer_update, orthogonal_update)
        for one in update(architecture.layers[kind], workload)
    )
    return of_layers + step_update(workload)


def uncounted_patterns(workload: Workload) -> tuple[str, ...]:
    """Patterns of ``recompute_config`` that name no operator of any layer they apply to, as far as the model of time has them.

    The compiled graph may have such an operator: it has more of them, most of which take next to no time.
    """
    found: dict[tuple[str, str], bool] = {}
    for number in {layer_key(workload, number): number for number in range(len(workload.plan.layers))}.values():
        own, spec = workload.plan.layers[number], workload.architecture.layers[number]
        forward = forward_work(spec, _tokens(workload), workload.seq_length, workload.strategy, workload.numerics)
        for pattern, matches in pattern_matches(forward, own).items():
            found[pattern] = matches or found.get(pattern, False)
    return tuple(
        f"what {key} names with '{pattern}', of which the model of time has nothing"
        for (key, pattern), matches in sorted(found.items())
        if not matches
    )


def layer_key(workload: Workload, number: int) -> Hashable:
    """Equal for layers that take equally long."""
    number_of = workload.architecture.specification_numbers  # cheaper to compare than specifications are
    return number_of[number], workload.plan.layers[number].kind(), _swap(workload, number)


def layer_part(workload: Workload, number: int) -> Part:
    """The passes of one layer, by each of its copies."""
    return spec_part(
        workload, workload.architecture.layers[number], workload.plan.layers[number], _swap(workload, number)
    )


def _swap(workload: Workload, number: int) -> Swap:
    return workload.swap[number] if workload.swap else ()


def spec_part(workload: Workload, spec: LayerSpec, own: LayerAssignment, swap: Swap = ()) -> Part:
    """The same of any layer, recomputed as ``own`` says. What a layer that predicts ahead has beside itself is not repeated,
    but for a loss in slices.
    """
    strategy, tokens, copies = workload.strategy, _tokens(workload) / workload.strategy.copies, workload.strategy.copies
    layer = whole = forward_work(spec, tokens, workload.seq_length, strategy, workload.numerics)
    if strategy.row_parts > 1:
        part = forward_work(spec, tokens / strategy.row_parts, workload.seq_length, strategy, workload.numerics)
        layer = in_row_parts(whole, part, strategy.row_parts)
    again = repeated_work(layer, own, strategy.repeat_exchanges)
    beside: Work = ()
    sums: Work = ()
    if spec.is_mtp:
        beside, sums = prediction_work(workload, tokens), of_tokens_ahead(sums_of_slices(workload))
        again = (*again, *of_tokens_ahead(repeated_loss(workload, tokens)))
    forward = (*layer, *beside)
    backward = (*backward_work(forward, spec.frozen, workload.numerics.adds_gradients), *sums)
    moved = moved_results(workload, spec, own, swap, whole)
    forward = (*forward, *_beside_in_reference(workload, spec, tokens))
    return Part(forward * copies, backward * copies, again * copies, moved, strategy.row_parts)


def _beside_in_reference(workload: Workload, spec: LayerSpec, tokens: float) -> Work:
    """The forward pass of the same layer of the reference, which has no adapters and keeps nothing."""
    if workload.reference is None:
        return ()
    same = workload.reference.layers[workload.architecture.layers.index(spec)]
    return forward_work(same, tokens, workload.seq_length, workload.strategy, workload.numerics)


def _tokens(workload: Workload) -> float:
    """Of a micro-batch on one rank."""
    return float(workload.rank_tokens)
