"""A lower bound of every order of a V within a memory limit, for given times of places.

Of each stage, with t the time of all its passes of a micro-batch, m micro-batches and M its memory:

- Its first backward pass waits for a micro-batch's way there: down and back in forward passes, and down to the stage in gradients
  of inputs. Before it there are forward passes alone, no more than M holds; the rest of that time is a wait.
- Behind its last forward pass the micro-batch goes back to the first stage, then down and back in gradients of inputs, and ends
  with gradients of weights. The stage has no more work left by then than what M held.
- A micro-batch is kept on a stage from its forward pass to its gradients of weights: its way from there and back at least. So MB
  times time of all micro-batches must find room in M.

The first two waits are counted together where M cannot hold all micro-batches: the last forward pass is then behind the first
backward pass.
"""

from __future__ import annotations

import numpy as np

from mindllm.planning.zero_bubble.folded_costs import DOWN, UP, FoldedCosts


def folded_bound(costs: FoldedCosts, micro_batches: int) -> float:
    """The time that no order of these costs is shorter than, from the first start to the last end."""
    return max(_of_stage(costs, micro_batches, stage) for stage in range(costs.stages))


def _of_stage(costs: FoldedCosts, micro: int, stage: int) -> float:
    forward, backward, weight, delay = costs.forward, costs.backward, costs.weight, costs.delay
    last = costs.stages - 1
    work = micro * float((forward + backward + weight)[:, stage].sum())
    arrives = float(forward[DOWN, :stage].sum()) + stage * delay
    turns = float(forward.sum() + backward[UP, :stage].sum()) + (2 * last + stage) * delay
    early = max(0.0, turns - _most(costs, forward[:, stage], micro, stage))
    way = float(forward[UP, :stage].sum() + backward.sum() + weight[DOWN, 0]) + (stage + 2 * last) * delay
    late = max(0.0, way - _most(costs, (backward + weight)[:, stage], micro, stage))
    waits = (
        early + late
        if micro * float(costs.held[:, stage].sum()) > costs.limit[stage] * (1 + 1e-9)
        else max(early, late)
    )
    return max(work + max(arrives, waits), arrives + _room(costs, micro, stage))


def _most(costs: FoldedCosts, times: np.ndarray, micro: int, stage: int) -> float:
    """The longest that operations take, one for each micro-batch and chunk that memory holds at once; ``times`` by chunk."""
    room, total = float(costs.limit[stage]) * (1 + 1e-9), 0.0
    held = costs.held[:, stage]
    for chunk in sorted((DOWN, UP), key=lambda own: -times[own] / max(float(held[own]), 1e-300)):
        count = micro if held[chunk] <= 0 else min(float(micro), room / float(held[chunk]))
        total += count * float(times[chunk])
        room -= count * float(held[chunk])
    return total


def _room(costs: FoldedCosts, micro: int, stage: int) -> float:
    """The time in which memory has room for all micro-batches, each kept for its way from the stage and back."""
    forward, backward, weight = costs.forward, costs.backward, costs.weight
    behind, before, delay = costs.stages - 1 - stage, stage, costs.delay
    back = forward[UP, : stage + 1].sum() + backward[UP, : stage + 1].sum() + 2 * before * delay
    down = forward[DOWN, stage:].sum() + forward[UP].sum() + backward[UP].sum() + backward[DOWN, stage:].sum()
    down += (2 * behind + 2 * (costs.stages - 1)) * delay
    kept = costs.held[UP, stage] * (back + weight[UP, stage]) + costs.held[DOWN, stage] * (down + weight[DOWN, stage])
    return micro * float(kept) / float(costs.limit[stage]) if costs.limit[stage] > 0 else 0.0
