"""Whether all ranks send the gradients of the same weights in one message, those the YAML puts together."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from mindllm.compiled.conformance.finding import Finding, Mistake, numbers_text, together
from mindllm.compiled.graph.compiled_graph import Node
from mindllm.compiled.graph.operators import BACKWARD, Operators, layer_of
from mindllm.config import RunConfig
from mindllm.parallel.context import optimizer_level
from mindllm.parallel.layer_plan import LayerPlan
from mindllm.parallel.layout import Mesh
from mindllm.parallel.pipeline import fusion_of_layer, fusion_of_others

FUSION = "fusion"
REDUCTIONS = ("AllReduce", "ReduceScatter")
UNFUSED = 0
REUSED = "CR_"  # begins names of weights inside networks that are compiled once for all parts of a batch


def gradient_fusion(config: RunConfig, plan: LayerPlan, mesh: Mesh, ranks: Sequence[Operators]) -> Finding | None:
    """The number of the message each weight's gradient is exchanged in: as asked for, and the same on all ranks of a group."""
    groups = config.parallel_config.gradient_aggregation_group
    found = {rank.graph.rank: _messages(rank) for rank in ranks}
    if not any(found.values()):
        return None
    mistakes = []
    for rank, messages in found.items():
        for weight, (number, members) in messages.items():
            where = layer_of(weight)
            wanted = fusion_of_layer(where[0], plan, groups) if where else fusion_of_others(plan, groups)
            if number != wanted and not (number == UNFUSED and _may_be_unfused(config)):
                mistakes.append(Mistake(rank, f"the gradient of {weight} is in message {number}, not {wanted}"))
            others = {found[member].get(weight, (None,))[0] for member in members if member in found}
            if others != {number}:
                text = f"the gradient of {weight} is in different messages on ranks {numbers_text(members)}"
                mistakes.append(Mistake(rank, text))
    numbers = {number for messages in found.values() for number, _ in messages.values()}
    wanted_numbers = {fusion_of_layer(layer, plan, groups) for layer in range(len(plan.layers))}
    wanted_numbers.add(fusion_of_others(plan, groups))
    asked = f"{_count(wanted_numbers)}, the same on all ranks"
    return Finding("gradient fusion", asked, _count(numbers), together(mistakes))


def _count(numbers: Collection[int]) -> str:
    return f"{len(numbers)} message{'s' * (len(numbers) != 1)}"


def _may_be_unfused(config: RunConfig) -> bool:
    """Whether MindSpore does not put gradients together: where weights are sharded between their uses."""
    return config.parallel.enable_parallel_optimizer and optimizer_level(config) == "level3"


def _messages(rank: Operators) -> dict[str, tuple[int, tuple[int, ...]]]:
    """By weight the number of the message its gradient is exchanged in, and the ranks of the exchange."""
    return {
        rank.weight(node).removeprefix(REUSED): (int(node.attributes.get(FUSION, 0)), node.ranks)
        for node in rank.nodes
        if node.op in REDUCTIONS and rank.phase(node) == BACKWARD and _is_of_a_weight(node)
    }


def _is_of_a_weight(node: Node) -> bool:
    return "mirror_user_id" in node.attributes or "mirror_user_id" in node.primal
