"""What ``mindllm offline`` keeps of somebody's program, read again: for each rank its simulation and its training graph."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from mindllm.compiled.graph.compiled_graph import CompiledGraph, Node, groups_of
from mindllm.compiled.graph.ir_text import read_ir_text
from mindllm.compiled.simulation.simulation import Simulation, load_simulation
from mindllm.config.reading.yaml_tree import read_yaml
from mindllm.errors import UserError
from mindllm.outside import LARGEST_YAML, read_text

SIMULATION = "simulation.json.gz"
TRAINING_GRAPH = "*_validate_*.ir"
MOST_NAMED = 5  # of missing stages
CONFIG = "config.yaml"  # a copy of the YAML that the program was given with --config
SINGLE, NOT_ALONE = "single", "why_not.txt"  # beside the ranks: the program on one device, or why there is none
RANKS = "group_rank_ids"
RANK = re.compile(r"rank_(\d+)")


@dataclass(frozen=True)
class KeptRank:
    """One simulated rank and where it is kept; files are read when they are asked for."""

    number: int
    directory: Path

    @cached_property
    def simulation(self) -> Simulation:
        """Its memory, its order, what it exchanges."""
        return load_simulation(self.directory / SIMULATION)

    @cached_property
    def graph(self) -> CompiledGraph:
        """Its training graph.

        Raises:
            UserError: there is none, there are several, or it cannot be read.
        """
        found = sorted(self.directory.glob(TRAINING_GRAPH))
        if len(found) != 1:
            raise UserError(
                f"{self.directory}: holds {len(found) or 'no'} training graph{'s' * (len(found) > 1)} ({TRAINING_GRAPH}); "
                "run mindllm offline again, with another --keep"
            )
        return with_own_groups(read_ir_text(found[0], self.number), self.simulation)


def with_own_groups(graph: CompiledGraph, simulation: Simulation) -> CompiledGraph:
    """The graph with the ranks of groups that the program made itself: the compiler takes these for the world."""
    known = {collective.group: collective.ranks for collective in simulation.collectives if collective.ranks}

    def corrected(node: Node) -> Node:
        ranks = known.get(node.attributes.get("group", ""))
        if ranks is None or ranks == node.ranks:
            return node
        return replace(node, attributes={**node.attributes, RANKS: ranks})

    functions = tuple(
        replace(function, nodes=tuple(corrected(node) if node.exchanges else node for node in function.nodes))
        for function in graph.functions
    )
    return replace(graph, functions=functions, groups=groups_of(functions))


def kept_ranks(directory: Path) -> list[KeptRank]:
    """The ranks kept in a directory, in order.

    Raises:
        UserError: there are none.
    """
    if not directory.is_dir():
        raise UserError(f"{directory}: there is no such directory; name one that mindllm offline kept (--keep)")
    found = [
        KeptRank(int(match[1]), path)
        for path in directory.iterdir()
        if (match := RANK.fullmatch(path.name)) and (path / SIMULATION).is_file()
    ]
    if not found:
        raise UserError(
            f"{directory}: holds no simulated rank (rank_N/{SIMULATION}); name a directory that mindllm offline kept"
        )
    return sorted(found, key=lambda rank: rank.number)


def kept_stages(directory: Path) -> list[KeptRank]:
    """A rank of every pipeline stage, in order.

    Raises:
        UserError: no ranks are kept, or none of some stage.
    """
    by_stage: dict[int, KeptRank] = {}
    ranks = kept_ranks(directory)
    for rank in ranks:
        by_stage.setdefault(rank.simulation.stage, rank)
    stages = max(by_stage) + 1
    missing = list(islice((stage for stage in range(stages) if stage not in by_stage), MOST_NAMED))
    if missing or min(by_stage) < 0:
        raise UserError(
            f"{directory}: holds no rank of stage {', '.join(map(str, missing))}; run mindllm offline with --ranks stages"
        )
    return [by_stage[stage] for stage in range(stages)]


def kept_config(directory: Path) -> Mapping[str, Any]:
    """The YAML that the program was given, where one is kept; empty otherwise."""
    path = directory / CONFIG
    try:
        tree = read_yaml(read_text(path, LARGEST_YAML), str(path)).data
    except (OSError, UserError):
        return {}
    return tree
