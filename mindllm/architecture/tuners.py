"""Tuning methods: one registry of the properties that other packages need.

LoRA: Hu et al., 2021; AdaLoRA: Zhang et al., 2023; bottleneck adapters: Houlsby et al., 2019; LLaMA Pro: Wu et al., 2024; GaLore:
Zhao et al., 2024; LISA: Pan et al., 2024. A new one is an entry here, its keys in ``config/tuning.py``, and where it has an
optimizer, state or checks of its own, a function under its name in ``optimizer_state.py``, ``config/checks/tuning.py``,
``train/optimizers/build.py`` and ``timing/costs/tuned_update.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from mindllm.architecture.adapters import is_adapter_weight, is_part

TuningKind = Literal["lora", "adalora", "bottleneck", "llamapro", "galore", "lisa", "full"]
LORA, ADALORA, BOTTLENECK, LLAMAPRO = "lora", "adalora", "bottleneck", "llamapro"
GALORE, LISA, FULL_TUNING = "galore", "lisa", "full"


@dataclass(frozen=True)
class Tuning:
    """What of a model is trained, and what its optimizer needs to know of that; the fields are keys of ``pet_config``.

    Adapters and frozen weights of layers are fields of the layers' own specifications.
    """

    pet_type: TuningKind
    modules_to_save: tuple[str, ...] = ()
    frozen_dtype: str = "float32"
    adalora_init_r: int = 12
    num_new_blocks: int = 4
    galore_rank: int = 128
    galore_update_proj_gap: int = 200
    freeze_include: tuple[str, ...] = ()
    freeze_exclude: tuple[str, ...] = ()

    @property
    def tuner(self) -> Tuner:
        """Return the tuning method."""
        return TUNERS[self.pet_type]


@dataclass(frozen=True)
class Tuner:
    """A tuning method.

    Attributes:
        name: value of ``pet_type``.
        keys: keys of ``pet_config`` for this method only.
        trains: whether it changes a weight of the model or of an adapter.
        low_rank: it has adapters on projections, in PEFT's format.
        own_format: its adapters have a format of mindllm that no Hugging Face model supports.
        of_all_weights: its checkpoints are those of any model.
        by_layer: layers are treated differently, so that one specification has several kinds.
        inserts_layers: it adds layers after some of the base.
        learns_pairs: the base is the reference of preference tuning.
        trains_mtp: it trains multi-token prediction layers.
        trains_experts: it trains weights of experts, which have three dimensions.
        whole_gradients: its optimizer needs complete gradients on each device.
        changes_gradients: it adds a penalty to gradients, which hides their sharding from the compiler.
        constants: keys of a run that are constants of its compiled step.
        width: key that a small model reduces; empty: none.
        not_merged: why its weights cannot be merged into the base; empty: they can, or there is nothing to merge.
    """

    name: str
    keys: tuple[str, ...]
    trains: Callable[[Tuning, str], bool]
    low_rank: bool = False
    own_format: bool = False
    of_all_weights: bool = False
    by_layer: bool = False
    inserts_layers: bool = False
    learns_pairs: bool = False
    trains_mtp: bool = False
    trains_experts: bool = True
    whole_gradients: bool = False
    changes_gradients: bool = False
    constants: tuple[str, ...] = ()
    width: str = ""
    not_merged: str = ""


def _low_rank(tuning: Tuning, name: str) -> bool:
    return is_adapter_weight(name) or any(is_part(module, name) for module in tuning.modules_to_save)


def _adapters(tuning: Tuning, name: str) -> bool:
    return is_adapter_weight(name)


def _everything(tuning: Tuning, name: str) -> bool:
    return True


def _not_frozen(tuning: Tuning, name: str) -> bool:
    if any(fnmatchcase(name, pattern) for pattern in tuning.freeze_include):
        return False
    return not tuning.freeze_exclude or any(fnmatchcase(name, pattern) for pattern in tuning.freeze_exclude)


ADAPTER_KEYS = ("lora_alpha", "lora_dropout", "modules_to_save", "target_modules", "frozen_dtype")
ADALORA_KEYS = ("init_r", "target_r", "tinit", "tfinal", "delta_t", "beta1", "beta2", "orth_reg_weight")

TUNERS: dict[str, Tuner] = {
    tuner.name: tuner
    for tuner in (
        Tuner(
            LORA,
            ("lora_rank", "use_rslora", "use_dora", "lora_plus_lr_ratio", *ADAPTER_KEYS),
            _low_rank,
            low_rank=True,
            learns_pairs=True,
            width="lora_rank",
        ),
        Tuner(
            ADALORA,
            (*ADAPTER_KEYS, *(f"adalora_{key}" for key in ADALORA_KEYS)),
            _low_rank,
            low_rank=True,
            whole_gradients=True,
            changes_gradients=True,
            constants=("runner_config.train_steps",),
        ),
        Tuner(
            BOTTLENECK,
            ("target_modules", "frozen_dtype", "adapter_length"),
            _adapters,
            own_format=True,
            width="adapter_length",
            not_merged="bottlenecks are never merged",
        ),
        Tuner(
            LLAMAPRO,
            ("frozen_dtype", "num_new_blocks"),
            _adapters,
            by_layer=True,
            inserts_layers=True,
            not_merged="new layers stand between those of its base",
        ),
        Tuner(
            GALORE,
            ("galore_rank", "galore_update_proj_gap", "galore_scale"),
            _everything,
            of_all_weights=True,
            trains_experts=False,
            whole_gradients=True,
        ),
        Tuner(
            LISA,
            ("lisa_activated_layers", "lisa_step_interval"),
            _everything,
            of_all_weights=True,
            trains_experts=False,
            constants=("seed",),
        ),
        Tuner(
            FULL_TUNING,
            ("freeze_include", "freeze_exclude"),
            _not_frozen,
            of_all_weights=True,
            by_layer=True,
            trains_mtp=True,
        ),
    )
}


def tuners_with(key: str) -> tuple[str, ...]:
    """Return the tuning methods that a key of ``pet_config`` applies to."""
    return tuple(name for name, tuner in TUNERS.items() if key in tuner.keys) or tuple(TUNERS)


def is_trained(tuning: Tuning | None, name: str) -> bool:
    """Return whether training changes the weight of this name, which is one of the model that is tuned or of an adapter."""
    return tuning is None or tuning.tuner.trains(tuning, name)


@dataclass(frozen=True)
class Origin:
    """Source of a layer in a tuned model: its number in the base; ``copied``: a new layer after that one."""

    number: int
    copied: bool = False


def layer_origins(tuning: Tuning | None, layers: int) -> tuple[Origin, ...]:
    """Return the layers of a tuned model in order, for a base with this number of ``layers``."""
    if tuning is None or not tuning.tuner.inserts_layers:
        return tuple(map(Origin, range(layers)))
    group = max(1, layers // tuning.num_new_blocks)
    origins: list[Origin] = []
    for number in range(layers):
        origins.append(Origin(number))
        if (number + 1) % group == 0:
            origins.append(Origin(number, copied=True))
    return tuple(origins)
