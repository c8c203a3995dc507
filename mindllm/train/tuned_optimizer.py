"""The optimizer of a run: AdamW, with what the tuning of the model adds to its steps."""

from __future__ import annotations

from collections.abc import Sequence

from mindspore import Parameter

from mindllm.config import RunConfig
from mindllm.config.tuning import ADALORA
from mindllm.config.tuning_state import triplets
from mindllm.models.expert_load import is_probe
from mindllm.train.optimizer import AdamW
from mindllm.tune.rank_allocation import OrthogonalPenalty, RankAllocation


def make_optimizer(parameters: Sequence[Parameter], config: RunConfig) -> AdamW:
    """Updates ``parameters`` as the sections of the optimizer and of the tuning say."""
    model = config.model.config
    pet, rate = model.pet_config, model.topk_bias_update_rate
    if pet is None or pet.pet_type != ADALORA:
        return AdamW(parameters, config.optimizer, rate, pet)
    groups, steps = triplets(model.architecture), config.runner_config.train_steps
    assert steps is not None  # or loading had refused it
    weights = [parameter for parameter in parameters if not is_probe(parameter.name)]
    penalty = OrthogonalPenalty(parameters, groups, pet.adalora_orth_reg_weight)
    return AdamW(parameters, config.optimizer, rate, pet, penalty, RankAllocation(weights, groups, pet, steps))
