"""Plans that a person wrote: YAML of names, each with the lists of a run.

mine: {offset: [1, 0, 0, -1], recompute: [4, 2, 0, 0], select_recompute: false, select_comm_recompute: false}
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mindllm.config.reading.yaml_tree import read_mapping
from mindllm.errors import UserError, nearest
from mindllm.planning.plan import Evaluation, evaluate
from mindllm.planning.problem import Problem
from mindllm.planning.yaml_plan import KEYS, read_yaml_plan

IGNORED = ("show", "file_name")  # of the public planner's files: how it draws
KNOWN = ("offset", *KEYS, "interleave_num", *IGNORED)


def evaluate_manual(problem: Problem, path: Path) -> dict[str, Evaluation]:
    """Every plan of the file as the simulator judges it, by name.

    Raises:
        UserError: no such file, a key or list that makes no plan of ``problem``; names the plan and the key.
    """
    plans = read_mapping(path)
    if not plans:
        raise UserError(f"{path}: holds no plan")
    found = {}
    for name, fields in plans.items():
        source = f"{path}: {name}"
        if not isinstance(fields, Mapping):
            raise UserError(f"{source}: must hold keys such as offset and recompute, not {fields!r}")
        for key in fields:
            if key not in KNOWN:
                raise UserError(f"{source}: {key}: no such key{nearest(str(key), KNOWN)}")
        chunks = fields.get("interleave_num", problem.chunks)
        if not isinstance(chunks, int) or chunks < 1:
            raise UserError(f"{source}: interleave_num: must be a number of chunks (is {chunks!r})")
        if problem.v_shape and chunks != problem.chunks:
            raise UserError(f"{source}: interleave_num: a V has {problem.chunks} chunks (is {chunks})")
        own = problem.model_copy(update={"chunks": chunks})
        if own.layer_count < own.places:
            raise UserError(f"{source}: interleave_num: {own.layer_count} layers cannot fill {own.places} places")
        found[str(name)] = evaluate(own, read_yaml_plan(own, fields, source))
    return found
