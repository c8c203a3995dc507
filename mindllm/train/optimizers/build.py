"""The optimizer of a run: AdamW, with what the tuning of the model adds to its steps or changes in them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from mindspore import Parameter

from mindllm.architecture.optimizer_state import CODE_BITS, MUON, triplets
from mindllm.architecture.tuners import ADALORA, GALORE, LISA
from mindllm.config import RunConfig
from mindllm.config.tuning import PetConfig
from mindllm.models.experts.expert_load import is_probe
from mindllm.parallel.layer_plan import make_plan
from mindllm.parallel.layout import Mesh, mesh_of
from mindllm.parallel.weight_cut import WeightCut
from mindllm.train.optimizers.adalora import AdaLoraRankAllocator, OrthogonalPenalty
from mindllm.train.optimizers.adamw import AdamW
from mindllm.train.optimizers.adamw_8bit import AdamW8bit
from mindllm.train.optimizers.galore import GaLoreAdamW
from mindllm.train.optimizers.lisa import LAYER, LisaAdamW
from mindllm.train.optimizers.muon import MuonAdamW
from mindllm.train.optimizers.qk_clip import make_qk_clip

Optimizer = AdamW | AdamW8bit | GaLoreAdamW | LisaAdamW | MuonAdamW


def make_optimizer(
    parameters: Sequence[Parameter],
    config: RunConfig,
    cuts: Mapping[str, WeightCut] | None = None,
    rank: int = 0,
    shares: Sequence[Parameter] = (),
    largest: Sequence[Parameter] = (),
    process: tuple[int, int] = (0, 1),
) -> Optimizer:
    """Updates ``parameters`` as the sections of the optimizer and of the tuning say, and sets ``shares``, which balance experts.
    ``largest``: the largest attention logits that layers keep, for QK-clip. ``process``: this one among those that have
    the whole model each, and their number.

    ``cuts`` over the devices of a stage, by name, as global ``rank`` sees them; None: each has the whole model.
    """
    model, pet = config.model.config, config.model.config.pet_config
    if pet is not None and (make := OPTIMIZERS.get(pet.tuner.name)):
        return make(parameters, config, pet, cuts, rank)
    rates = config.grouped_lr_schedule
    if config.optimizer.type == MUON:
        elsewhere = _elsewhere(parameters, config, rank)
        mesh = Mesh() if cuts is None else mesh_of(config)
        own, processes = process if cuts is None else (rank, 1)
        clip = make_qk_clip(parameters, largest, config, cuts, own, elsewhere, mesh, processes)
        bias_rate = model.topk_bias_update_rate
        return MuonAdamW(parameters, config.optimizer, cuts, rank, elsewhere, rates, clip, bias_rate, shares)
    if config.optimizer.state_bits == CODE_BITS:
        elsewhere = _elsewhere(parameters, config, rank)
        return AdamW8bit(parameters, config.optimizer, cuts, rank, elsewhere, rates, config.error)
    return AdamW(parameters, config.optimizer, model.topk_bias_update_rate, pet, groups=rates, shares=shares)


def _galore(
    parameters: Sequence[Parameter], config: RunConfig, pet: PetConfig, cuts: Mapping[str, WeightCut] | None, rank: int
) -> GaLoreAdamW:
    return GaLoreAdamW(parameters, config.optimizer, pet, cuts, rank, _elsewhere(parameters, config, rank))


def _lisa(
    parameters: Sequence[Parameter], config: RunConfig, pet: PetConfig, cuts: Mapping[str, WeightCut] | None, rank: int
) -> LisaAdamW:
    return LisaAdamW(parameters, config.optimizer, pet, config.model.config.num_layers, config.seed)


def _adalora(
    parameters: Sequence[Parameter],
    config: RunConfig,
    pet: PetConfig,
    cuts: Mapping[str, WeightCut] | None,
    rank: int,
) -> AdamW:
    model, steps = config.model.config, config.runner_config.train_steps
    assert steps is not None  # or loading had refused it
    groups = triplets(model.architecture)
    weights = [parameter for parameter in parameters if not is_probe(parameter.name)]
    whole = cuts or {item.name: WeightCut(tuple(item.shape)) for item in weights}
    penalty = OrthogonalPenalty(parameters, groups, pet.adalora_orth_reg_weight, whole, rank)
    several = cuts is not None and shares_weights(config, cuts)
    allocation = AdaLoraRankAllocator(weights, groups, pet, steps, whole, rank, several)
    rates = config.grouped_lr_schedule
    return AdamW(parameters, config.optimizer, model.topk_bias_update_rate, pet, penalty, allocation, rates)


EMBEDDINGS = "embedding"
"""In the names of all tables of tokens and positions."""
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {ADALORA: _adalora, GALORE: _galore, LISA: _lisa}
"""By the tuner that changes the update; the others have AdamW as it is."""


def _elsewhere(parameters: Sequence[Parameter], config: RunConfig, rank: int) -> frozenset[str]:
    """Weights of other pipeline stages than that of ``rank``: embeddings are on the first, the head is behind the last layer."""
    plan, stage = make_plan(config), mesh_of(config).stage_of(rank)
    found = {item.name: LAYER.match(item.name) for item in parameters}
    ends = {name: 0 if EMBEDDINGS in name else config.last_stage for name in found}
    stages = {name: plan.layers[int(one[1])].stage if one else ends[name] for name, one in found.items()}
    return frozenset(name for name, where in stages.items() if where != stage)


def shares_weights(config: RunConfig, cuts: Mapping[str, WeightCut]) -> bool:
    """Whether no device has all that is trained: weights are cut, or on several stages."""
    return mesh_of(config).pipeline_stage > 1 or not all(cut.is_whole for cut in cuts.values())
