"""Read what ``mindllm offline`` kept of a program: the simulation and the training graph of each rank."""

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
MISSING_STAGES_NAMED = 5
CONFIG = "config.yaml"  # a copy of the YAML that the program receives with --config
SINGLE, NOT_ALONE = "single", "why_not.txt"  # the program on one device, or why it could not run there
RANKS = "group_rank_ids"
RANK_DIRECTORY = re.compile(r"rank_(\d+)")


@dataclass(frozen=True)
class KeptRank:
    """A simulated rank in a directory. Its files are read on first use."""

    number: int
    directory: Path

    @cached_property
    def simulation(self) -> Simulation:
        """Memory, execution order and exchanges."""
        return load_simulation(self.directory / SIMULATION)

    @cached_property
    def graph(self) -> CompiledGraph:
        """The training graph.

        Raises:
            UserError: it is missing, ambiguous or unreadable.
        """
        files = sorted(self.directory.glob(TRAINING_GRAPH))
        if len(files) != 1:
            raise UserError(
                f"{self.directory}: contains {len(files) or 'no'} training graph{'s' * (len(files) > 1)} ({TRAINING_GRAPH}); "
                "run mindllm offline again, with another --keep"
            )
        return with_simulated_groups(read_ir_text(files[0], self.number), self.simulation)


def with_simulated_groups(graph: CompiledGraph, simulation: Simulation) -> CompiledGraph:
    """Return the graph with the simulated ranks of groups that the program created; the compiler takes these for the world."""
    simulated = {collective.group: collective.ranks for collective in simulation.collectives if collective.ranks}

    def correct(node: Node) -> Node:
        ranks = simulated.get(node.attributes.get("group", ""))
        if ranks is None or ranks == node.ranks:
            return node
        return replace(node, attributes={**node.attributes, RANKS: ranks})

    functions = tuple(
        replace(function, nodes=tuple(correct(node) if node.exchanges else node for node in function.nodes))
        for function in graph.functions
    )
    return replace(graph, functions=functions, groups=groups_of(functions))


def kept_ranks(directory: Path) -> list[KeptRank]:
    """Return the ranks in a directory, in order.

    Raises:
        UserError: the directory contains none.
    """
    if not directory.is_dir():
        raise UserError(f"{directory}: directory not found; pass one that mindllm offline wrote (--keep)")
    ranks = [
        KeptRank(int(match[1]), path)
        for path in directory.iterdir()
        if (match := RANK_DIRECTORY.fullmatch(path.name)) and (path / SIMULATION).is_file()
    ]
    if not ranks:
        raise UserError(
            f"{directory}: contains no simulated rank (rank_N/{SIMULATION}); pass a directory that mindllm offline wrote"
        )
    return sorted(ranks, key=lambda rank: rank.number)


def kept_stages(directory: Path) -> list[KeptRank]:
    """Return a rank of every pipeline stage, in order.

    Raises:
        UserError: there are no ranks, or a stage has none.
    """
    by_stage: dict[int, KeptRank] = {}
    for rank in kept_ranks(directory):
        by_stage.setdefault(rank.simulation.stage, rank)
    stages = max(by_stage) + 1
    missing = list(islice((stage for stage in range(stages) if stage not in by_stage), MISSING_STAGES_NAMED))
    if missing or min(by_stage) < 0:
        raise UserError(
            f"{directory}: no rank of stage {', '.join(map(str, missing))}; run mindllm offline with --ranks stages"
        )
    return [by_stage[stage] for stage in range(stages)]


def kept_config(directory: Path) -> Mapping[str, Any]:
    """Return the YAML that the program received; empty without one."""
    path = directory / CONFIG
    try:
        return read_yaml(read_text(path, LARGEST_YAML), str(path)).data
    except (OSError, UserError):
        return {}
