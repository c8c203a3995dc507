"""Learning from pairs of answers: what the reference needs, and keys that say something about no pairs."""

from __future__ import annotations

from collections.abc import Iterator

from mindllm.axes import CONTEXT
from mindllm.config.checks import Finding
from mindllm.config.preference import PreferenceConfig
from mindllm.config.reading.document import KeyPath
from mindllm.config.run import RunConfig

SECTION: KeyPath = ("preference",)
TUNING: KeyPath = ("model", "model_config", "pet_config")
LOADER: KeyPath = ("train_dataset", "data_loader", "type")


def check_preference(config: RunConfig) -> Iterator[Finding]:
    """Everything about the section, and what pairs are learnt with."""
    section = config.preference
    if section.label_smoothing and section.loss_type != "sigmoid":
        message = f"is of loss_type sigmoid, not {section.loss_type} (value {section.label_smoothing}); write 0"
        yield (*SECTION, "label_smoothing"), message
    if section.simpo_gamma != PreferenceConfig.model_fields["simpo_gamma"].default and section.loss_type != "simpo":
        message = f"is of loss_type simpo, not {section.loss_type} (value {section.simpo_gamma}); leave it out"
        yield (*SECTION, "simpo_gamma"), message
    for name in ("desirable_weight", "undesirable_weight"):
        if (weight := getattr(section, name)) != 1 and not section.is_unpaired:
            message = f"is of loss_type kto or apo_zero_unpaired, not {section.loss_type} (value {weight}); write 1"
            yield (*SECTION, name), message
    if not config.is_preference_tuning:
        if section != PreferenceConfig():
            kind = config.train_dataset.data_loader.type
            message = f"pairs of answers are of type PreferenceDataLoader (value {kind}); write that, or leave out the section"
            yield LOADER, f"{message} preference"
        return
    if config.run_mode in ("train", "finetune"):
        if section.has_reference:
            yield from _reference(config)
        yield from _devices(config)
    elif config.run_mode == "eval" and not config.eval_tasks:
        yield LOADER, "pairs are evaluated beside their reference, while a run trains; write do_eval: true and train on"


def _reference(config: RunConfig) -> Iterator[Finding]:
    """The reference is the model without its adapters, so all that is trained must be adapters."""
    model = config.model.config
    pet = model.pet_config
    if pet is None or not pet.tuner.learns_pairs:
        value = "null" if pet is None else pet.pet_type
        path = TUNING if pet is None else (*TUNING, "pet_type")
        yield (
            path,
            f"pairs are learnt by adapters; the base without them is the reference (value {value}); write pet_type: lora, "
            "or preference.loss_type: orpo or simpo, which need none",
        )
        return
    if pet.modules_to_save:
        message = (
            f"the reference is the base, whose parts stay as they are (value {list(pet.modules_to_save)}); write []"
        )
        yield (*TUNING, "modules_to_save"), message


def _devices(config: RunConfig) -> Iterator[Finding]:
    """What pairs cannot be divided by yet."""
    if config.parallel_config.shares_sequences:
        ways = config.parallel_config.size(CONTEXT)
        message = f"pairs of answers are not learnt from parts of their sequences yet (value {ways}); write 1"
        yield ("parallel_config", CONTEXT.key), message
    if any(layer.adds_to_loss for layer in config.model.config.base.architecture.specifications()):
        yield LOADER, "a model with experts, which add to the loss, does not learn from pairs yet; take a dense one"
