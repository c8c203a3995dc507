"""Cross checks of fine-tuning: adapters, frozen weights and preference tuning."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase

from mindllm.architecture.adapters import PARTS, is_part
from mindllm.architecture.layer import LayerSpec
from mindllm.architecture.tuners import (
    ADALORA,
    BOTTLENECK,
    FULL_TUNING,
    GALORE,
    LISA,
    LLAMAPRO,
    is_trained,
    tuners_with,
)
from mindllm.axes import CONTEXT
from mindllm.config.checks import MODEL, Finding
from mindllm.config.model import Files, names, targets
from mindllm.config.reading.document import KeyPath
from mindllm.config.run import RunConfig
from mindllm.config.tuning import ALL, PetConfig, PreferenceConfig
from mindllm.errors import few, nearest

SECTION: KeyPath = (*MODEL, "pet_config")
ROUTER_BIAS = "feed_forward.router.bias"
FREEZING = ("freeze_include", "freeze_exclude")
Layers = tuple[LayerSpec, ...]


def check_tuning(config: RunConfig) -> Iterator[Finding]:
    """Check the section ``pet_config``, and adapters without a model."""
    if config.adapter_id and not config.load_adapter:
        yield (
            ("adapter_id",),
            f"chooses one of the adapters below load_adapter, which is empty (value {config.adapter_id})",
        )
    model = config.model.config
    pet = model.pet_config
    if pet is None:
        return
    yield from _not_computed(config, pet)
    base = model.base.architecture
    for key, message in mistakes(pet, base.layers, model.projections_in_files, base.weight_shapes()):
        yield (*SECTION, key), message


def _not_computed(config: RunConfig, pet: PetConfig) -> Iterator[Finding]:
    """Check for combinations that are not supported yet."""
    model = config.model.config
    if pet.tuner.own_format and config.export_hf.directory:
        message = f"no Hugging Face model has bottlenecks (value {config.export_hf.directory}); leave it out"
        yield ("export_hf", "directory"), message
    if model.expert_num > 1 and not pet.tuner.trains_experts:
        message = f"experts are not trained with pet_type {pet.pet_type} yet (value {pet.pet_type})"
        yield (*SECTION, "pet_type"), f"{message}; write pet_type: full, or lora"
    if pet.pet_type == ADALORA:
        yield from _rank_schedule(config, pet)
    if model.topk_bias_update_rate and any(ROUTER_BIAS in layer.frozen for layer in model.architecture.layers):
        message = f"changes biases of routers, which are frozen (value {model.topk_bias_update_rate}); write 0"
        yield (*MODEL, "topk_bias_update_rate"), message


def _rank_schedule(config: RunConfig, pet: PetConfig) -> Iterator[Finding]:
    """Check that the end of the rank schedule is known."""
    steps = config.runner_config.train_steps
    if steps is None:
        yield (
            ("runner_config", "train_steps"),
            "the budget of pet_type adalora falls until the end of the run; write its steps",
        )
    elif pet.adalora_tinit + pet.adalora_tfinal >= steps:
        message = f"leaves no steps between adalora_tinit {pet.adalora_tinit} and adalora_tfinal {pet.adalora_tfinal}"
        yield ("runner_config", "train_steps"), f"{message} (value {steps}); write more"


def mistakes(
    pet: PetConfig, layers: tuple[LayerSpec, ...], files: Files, weights: Iterable[str]
) -> Iterator[tuple[str, str]]:
    """Yield invalid keys of the section with the reason. ``weights`` are all weights of the model."""
    weights = list(weights)
    # keys that have no effect with this tuner
    for key, info in type(pet).model_fields.items():
        kinds = tuners_with(key)
        if pet.tuner.name in kinds or getattr(pet, key) == info.default:
            continue
        if key in FREEZING:
            message = (
                f"adapters freeze the whole model (pet_type {pet.pet_type}); write pet_type: full, or modules_to_save"
            )
            yield key, message
        else:
            yield key, f"is a key of pet_type {' and '.join(kinds)} (pet_type here: {pet.pet_type}); leave it out"
    if check := MISTAKES.get(pet.tuner.name):
        yield from check(pet, layers, weights)
    if pet.tuner.low_rank:
        yield from _wrong_targets(pet, layers, files)
        for module in pet.modules_to_save:
            if not any(is_part(module, name) for name in weights):
                levels = {level for name in weights for level in name.split(".")[:-1] if not level.isdigit()}
                yield "modules_to_save", f"{module} is not part of the model{nearest(module, levels)}"


def _llamapro(pet: PetConfig, layers: Layers, weights: list[str]) -> Iterator[tuple[str, str]]:
    if len(layers) % pet.num_new_blocks:
        possible = ", ".join(str(count) for count in range(1, len(layers) + 1) if len(layers) % count == 0)
        message = f"must divide the {len(layers)} layers (value {pet.num_new_blocks}); write one of {possible}"
        yield "num_new_blocks", message


def _adalora(pet: PetConfig, layers: Layers, weights: list[str]) -> Iterator[tuple[str, str]]:
    if pet.adalora_target_r > pet.adalora_init_r:
        message = f"is above the rank at the start, {pet.adalora_init_r} (value {pet.adalora_target_r})"
        yield "adalora_target_r", f"{message}; write at most that"


def _galore(pet: PetConfig, layers: Layers, weights: list[str]) -> Iterator[tuple[str, str]]:
    widths = {module: min(shape) for layer in layers for module, shape in layer.adaptable().items()}
    narrowest = min(widths, key=lambda module: widths[module])
    if pet.galore_rank > (width := widths[narrowest]):
        message = f"is above the width of {narrowest}, {width} (value {pet.galore_rank}); write at most {width}"
        yield "galore_rank", message


def _lisa(pet: PetConfig, layers: Layers, weights: list[str]) -> Iterator[tuple[str, str]]:
    if pet.lisa_activated_layers > len(layers):
        message = f"is above the {len(layers)} layers of the model (value {pet.lisa_activated_layers})"
        yield "lisa_activated_layers", f"{message}; write at most that"


def _full(pet: PetConfig, layers: Layers, weights: list[str]) -> Iterator[tuple[str, str]]:
    for key in FREEZING:
        for pattern in getattr(pet, key):
            if not any(fnmatchcase(name, pattern) for name in weights):
                yield key, f"pattern '{pattern}' matches no weight; weights are called {weights[0]} or {weights[1]}"
    if not any(is_trained(pet.tuning, name) for name in weights):
        yield "freeze_include", "nothing is left to train"


def _bottlenecks(pet: PetConfig, layers: Layers, weights: list[str]) -> Iterator[tuple[str, str]]:
    modules, key, width = pet.target_modules, "target_modules", layers[0].attention.hidden_size
    if isinstance(modules, str) and modules != ALL:
        yield (
            key,
            f"bottlenecks follow complete parts of a layer (value {modules}); write ALL, or a list of {', '.join(PARTS)}",
        )
    elif modules != ALL and (not modules or {*modules} - {*PARTS}):
        wrong = next((name for name in modules if name not in PARTS), "")
        yield (
            key,
            f"bottlenecks follow {' and '.join(PARTS)}, not {wrong or 'nothing'}{nearest(wrong, PARTS)}",
        )
    if pet.adapter_length > width:
        yield (
            "adapter_length",
            f"is above the width of the model, {width} (value {pet.adapter_length}); write at most {width}",
        )


def _wrong_targets(pet: PetConfig, layers: tuple[LayerSpec, ...], files: Files) -> Iterator[tuple[str, str]]:
    key, selection = "target_modules", pet.target_modules
    modules = {module: shape for layer in layers for module, shape in layer.adaptable().items()}
    candidates = [*modules, *files]
    if not isinstance(selection, str):
        for name in selection:
            if not any(names(name, module, files) for module in modules):
                yield (
                    key,
                    f"{name} is not a projection of the model{nearest(name, [path.split('.')[-1] for path in candidates])}",
                )
                return
    matched: dict[str, set[bool]] = {}
    for number, layer in enumerate(layers):
        for module in layer.adaptable():
            matched.setdefault(module, set()).add(targets(pet, module, files, number))
    if not any(True in values for values in matched.values()):
        names_in = selection.split(",") if isinstance(selection, str) else []
        listed = f"write a list, [{', '.join(map(str.strip, names_in))}]; " if len(names_in) > 1 else ""
        yield key, f"matches no projection (value {selection}); {listed}projections: {few(list(modules))}"
    for module, values in matched.items():
        if len(values) > 1:
            yield key, f"must name {module} in all layers or in none (value {selection})"
            return
    widths = {module: min(shape) for module, shape in modules.items() if True in matched[module]}
    narrowest = min(widths, key=lambda module: widths[module], default="")
    if narrowest and pet.rank > widths[narrowest]:
        width, key = widths[narrowest], "adalora_init_r" if pet.pet_type == ADALORA else "lora_rank"
        yield key, f"is above the width of {narrowest}, {width} (value {pet.rank}); write at most {width}"


MISTAKES = {
    ADALORA: _adalora,
    BOTTLENECK: _bottlenecks,
    LLAMAPRO: _llamapro,
    GALORE: _galore,
    LISA: _lisa,
    FULL_TUNING: _full,
}
"""By the tuner whose keys they are about."""


PREFERENCE: KeyPath = ("preference",)
TUNING: KeyPath = ("model", "model_config", "pet_config")
LOADER: KeyPath = ("train_dataset", "data_loader", "type")


def check_preference(config: RunConfig) -> Iterator[Finding]:
    """Check the section ``preference``, and its data and model."""
    section = config.preference
    if section.label_smoothing and section.loss_type != "sigmoid":
        message = f"is of loss_type sigmoid, not {section.loss_type} (value {section.label_smoothing}); write 0"
        yield (*PREFERENCE, "label_smoothing"), message
    if section.simpo_gamma != PreferenceConfig.model_fields["simpo_gamma"].default and section.loss_type != "simpo":
        message = f"is of loss_type simpo, not {section.loss_type} (value {section.simpo_gamma}); leave it out"
        yield (*PREFERENCE, "simpo_gamma"), message
    for name in ("desirable_weight", "undesirable_weight"):
        if (weight := getattr(section, name)) != 1 and not section.is_unpaired:
            message = f"is of loss_type kto or apo_zero_unpaired, not {section.loss_type} (value {weight}); write 1"
            yield (*PREFERENCE, name), message
    if not config.is_preference_tuning:
        if section != PreferenceConfig():
            kind = config.train_dataset.data_loader.type
            message = f"pairs of answers are of type PreferenceDataLoader (value {kind}); write that, or leave out the section"
            yield LOADER, f"{message} preference"
        return
    if config.run_mode in ("train", "finetune"):
        if section.has_reference:
            yield from _reference(config)
        # what pairs cannot be divided by yet
        if config.parallel_config.shares_sequences:
            ways = config.parallel_config.size(CONTEXT)
            message = f"pairs of answers are not learnt from parts of their sequences yet (value {ways}); write 1"
            yield ("parallel_config", CONTEXT.key), message
        if any(layer.adds_to_loss for layer in config.model.config.base.architecture.specifications()):
            yield LOADER, "a model with experts, which add to the loss, does not learn from pairs yet; take a dense one"
    elif config.run_mode == "eval" and not config.eval_tasks:
        yield LOADER, "preference pairs are evaluated during training only; write do_eval: true and run_mode finetune"


def _reference(config: RunConfig) -> Iterator[Finding]:
    """Check that only adapters are trained: the reference is the model without them."""
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
