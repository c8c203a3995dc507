"""Section ``monitor_config``: figures that a step cannot give."""

from __future__ import annotations

from collections.abc import Iterator

from mindllm.architecture.optimizer_state import CODE_BITS, MUON
from mindllm.architecture.tuners import ADALORA, GALORE, LISA
from mindllm.config.checks import Finding
from mindllm.config.monitor import KEYS, UPDATE
from mindllm.config.run import RunConfig

SECTION = "monitor_config"


def check_monitor(config: RunConfig) -> Iterator[Finding]:
    """What is watched, and that it can be."""
    monitor = config.monitor_config
    watched = monitor.watched()
    if monitor.monitor_on and not watched:
        yield (SECTION, "monitor_on"), f"computes nothing; write false, or one of {', '.join(KEYS.values())}: log"
    pet, otherwise = config.model.config.pet_config, ""
    if pet is not None and pet.tuner.name in (ADALORA, GALORE, LISA):
        otherwise = pet.pet_type
    elif config.optimizer.type == MUON:
        otherwise = f"optimizer.type {MUON}"
    elif config.optimizer.state_bits == CODE_BITS:
        otherwise = f"optimizer.state_bits {CODE_BITS}"
    elif config.model.config.has_half_parameters:
        otherwise = f"a rounded parameter (param_init_type {config.model.config.param_init_type})"
    if UPDATE in watched and otherwise:
        yield (
            (SECTION, KEYS[UPDATE]),
            f"is found from the moments of AdamW, and {otherwise} updates otherwise; write null",
        )
