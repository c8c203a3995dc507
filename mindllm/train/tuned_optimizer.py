"""The optimizer of a run: AdamW, with what the tuning of the model adds to its steps or changes in them."""

from __future__ import annotations

from collections.abc import Sequence

from mindspore import Parameter

from mindllm.config import RunConfig
from mindllm.config.optimizer_state import triplets
from mindllm.config.tuning import ADALORA, GALORE, LISA, PetConfig
from mindllm.models.expert_load import is_probe
from mindllm.train.optimizer import AdamW
from mindllm.train.projected_optimizer import ProjectedAdamW
from mindllm.train.sampled_layers import SampledLayers
from mindllm.tune.rank_allocation import OrthogonalPenalty, RankAllocation

Optimizer = AdamW | ProjectedAdamW | SampledLayers


def make_optimizer(parameters: Sequence[Parameter], config: RunConfig) -> Optimizer:
    """Updates ``parameters`` as the sections of the optimizer and of the tuning say."""
    model = config.model.config
    pet = model.pet_config
    if pet is not None and pet.pet_type == GALORE:
        return ProjectedAdamW(parameters, config.optimizer, pet)
    if pet is not None and pet.pet_type == LISA:
        return SampledLayers(parameters, config.optimizer, pet, model.num_layers, config.seed)
    if pet is not None and pet.pet_type == ADALORA:
        return _with_rank_allocation(parameters, config, pet)
    return AdamW(parameters, config.optimizer, model.topk_bias_update_rate, pet)


def _with_rank_allocation(parameters: Sequence[Parameter], config: RunConfig, pet: PetConfig) -> AdamW:
    model, steps = config.model.config, config.runner_config.train_steps
    assert steps is not None  # or loading had refused it
    groups = triplets(model.architecture)
    weights = [parameter for parameter in parameters if not is_probe(parameter.name)]
    penalty = OrthogonalPenalty(parameters, groups, pet.adalora_orth_reg_weight)
    allocation = RankAllocation(weights, groups, pet, steps)
    return AdamW(parameters, config.optimizer, model.topk_bias_update_rate, pet, penalty, allocation)
