"""Fine-tuning a model that a person names, on files of conversations or pairs: the run, each choice with its reason."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from mindllm.config.reading.document import at
from mindllm.config.reading.overrides import Overrides, split_overrides
from mindllm.errors import UserError
from mindllm.recipes.common import (
    batch_choices,
    layout_choices,
    rate_choices,
    saving_choices,
    usable_devices,
)
from mindllm.recipes.device import CPU, device_choices, device_here, devices_here
from mindllm.recipes.model_source import ModelSource
from mindllm.recipes.rates import ADAPTERS, PAIRS, PET, PREFERENCES, UNPAIRED, Case, figure
from mindllm.recipes.recipe import Choice, Recipe, override_keys
from mindllm.recipes.survey import CONVERSATIONS, Survey
from mindllm.recipes.survey import PAIRS as PAIRS_LOADER

BASE = "configs/base/pretrain.yaml"
LONG = 512  # tokens, above which lengths are rounded up further
DATA = "train_dataset.data_loader"
FILL = 0.95  # part of a pack that is full, about
PROBED_STEPS = 1000  # of a run that is only asked for its memory


def chat_keys(overrides: Overrides) -> dict[str, Any]:
    """Return the keys that a person gives for how conversations are written."""
    asked = at(override_keys(BASE, overrides), (*DATA.split("."), "config"))
    keys = ("chat_template", "chat_template_kwargs", "allowed_special_tokens")
    return {key: asked[key] for key in keys if key in asked} if isinstance(asked, dict) else {}


def method_for(model: ModelSource, loader: str, asked: str, labelled: bool = False) -> str:
    """Return the method of tuning: what is asked for, or what model and data suggest. ``labelled``: rows have one answer each,
    which is desirable or not.

    Raises:
        UserError: it does not go with the model or the data.
    """
    in_codes = model.architecture.quantization_config is not None
    if model.adapter or model.is_tuned:
        raise UserError(
            f"{model.path}: is an adapter beside its base; merge it first (mindllm weights merge {model.weights} DIR) and "
            "finetune what comes out"
        )
    suggested = (UNPAIRED if labelled else PAIRS) if loader == PAIRS_LOADER else "qlora" if in_codes else "lora"
    if labelled and asked not in ("", UNPAIRED):
        raise UserError(f"--method {asked}: these are answers with a label, desirable or not; write --method kto")
    if loader == PAIRS_LOADER and asked not in ("", *PREFERENCES):
        raise UserError(
            f"--method {asked}: learns from conversations, and these are pairs of answers; write --method dpo, or kto"
        )
    if loader == CONVERSATIONS and asked == PAIRS:
        raise UserError("--method dpo: learns from pairs of answers (chosen and rejected), and these are conversations")
    if loader == CONVERSATIONS and asked == UNPAIRED:
        raise UserError(
            "--method kto: learns from answers with a label (true or false), or from pairs, and these are conversations"
        )
    if asked == "qlora" and not in_codes:
        raise UserError(
            f"--method qlora: {model.path} has no weights in codes; make them first (mindllm quantize {model.path} DIR "
            "--calibration TEXT), or write --method lora"
        )
    if in_codes and asked not in ("", *PREFERENCES, *ADAPTERS):
        raise UserError(f"--method {asked}: weights in codes are not trained; write --method qlora")
    return asked or suggested


@dataclass(frozen=True)
class Tuning:
    """What a run is chosen by: the model, the data, the method, where it is written, and what a person asked for besides."""

    model: ModelSource
    data: Survey
    method: str
    output: Path
    overrides: Overrides = ()
    epochs: int | None = None
    skip_bad_rows: bool = False

    @cached_property
    def asked(self) -> Mapping[str, Any]:
        """The keys that a person gives."""
        return override_keys(BASE, self.overrides)

    def given(self, key: str) -> Any:
        """What a person gives for a dotted key, or None."""
        return at(self.asked, tuple(key.split(".")))

    @cached_property
    def case(self) -> Case:
        """What rows of the table are about."""
        parameters = self.model.architecture.base.parameter_count()
        return Case(self.method, parameters, self.data.rows, device_here())

    def figure(self, name: str) -> Any:
        """A figure of the table."""
        return figure(name, self.case)

    @cached_property
    def length(self) -> tuple[int, str]:
        """Tokens of a sample, and why."""
        if given := self.given("model.model_config.seq_length"):
            return given, "asked for"
        part, context = self.figure("quantile of lengths"), self.model.architecture.max_position_embedding
        wanted = max(1, self.data.length_at(part))
        step = self.figure("multiple of lengths" if wanted <= LONG else "multiple of long lengths")
        most = min(context, self.figure("longest row"))
        length = min(math.ceil(wanted / step) * step, most)
        cut = self.data.longer_than(length)
        about = "about " if cut and self.data.sampled else ""
        lost = f"{about}{cut} are longer and cut" if cut else "none is cut"
        limit = f", and {most} is the most" if wanted > most else ""
        of = f"of a sample of {len(self.data.lengths)} rows" if self.data.sampled else "of the rows"
        return length, f"{part:.0%} {of} have at most {wanted} tokens{limit}; {lost}"

    @cached_property
    def held_out(self) -> int:
        """Rows that are evaluated and not trained on."""
        if self.data.rows < self.figure("rows to hold any out"):
            return 0
        least, most = self.figure("held out at least"), self.figure("held out at most")
        return min(most, max(least, round(self.figure("held out") * self.data.rows)))

    @property
    def trained_rows(self) -> int:
        """Rows that are trained on."""
        return self.data.rows - self.held_out

    @cached_property
    def global_batch(self) -> int:
        """Samples of a step over all devices."""
        devices = usable_devices(devices_here())
        wanted = min(self.figure("rows of a step"), self.trained_rows)
        return max(1, wanted // devices) * devices

    @cached_property
    def packing(self) -> tuple[bool, str]:
        """Whether several conversations share a sample, and why."""
        padding, steps = self.padding, self._packed_steps
        if padding <= self.figure("padding"):
            return False, f"{padding:.0%} of a batch is padding, which is little"
        if steps < self.figure("least steps"):
            return False, f"{padding:.0%} of a batch is padding, and packs would make {steps} steps only"
        return True, f"without it {padding:.0%} of a batch is padding"

    @property
    def padding(self) -> float:
        """The part of a batch that is padding without packing."""
        length, _ = self.length
        return 1 - self.data.mean(length) / length

    @property
    def _packed_steps(self) -> int:
        """Steps of the usual epochs, about, with packing."""
        length, _ = self.length
        packs = math.ceil(self.trained_rows * self.data.mean(length) / (length * FILL))
        return packs // self.global_batch * self.figure("epochs")

    def notes(self) -> Iterator[str]:
        """Yield what to know of the choices before the run begins."""
        asked = self.given(f"{DATA}.config.packing") is not None
        if (
            self.data.loader == CONVERSATIONS
            and not asked
            and not self.packing[0]
            and self.padding > self.figure("padding")
        ):
            length, _ = self.length
            yield (
                f"{self.padding:.0%} of every batch is padding: rows have {self.data.mean(length):.0f} of {length} places on "
                f"average, and packing them would leave {self._packed_steps} steps, fewer than {self.figure('least steps')}. For "
                f"less padding: --{DATA}.config.packing=true with more --epochs or a smaller --batch_size, a shorter "
                "--seq_length (it cuts long rows), or more rows"
            )

    @property
    def samples(self) -> int:
        """Of a pass, about, where rows are packed."""
        length, _ = self.length
        if self.data.loader == CONVERSATIONS and self.packing[0]:
            return max(1, math.ceil(self.trained_rows * self.data.mean(length) / (length * FILL)))
        return max(1, self.trained_rows)


def finetune_recipe(tuning: Tuning, command: str) -> Recipe:
    """Return the run that trains a model further.

    Raises:
        UserError: it does not fit this machine, or the tokenizer is another model's.
    """
    _refuse_other_tokenizer(tuning)
    before = Recipe(command, BASE, tuple(_before_the_batch(tuning)))
    devices = usable_devices(devices_here())
    fit = batch_choices(
        tuning.case, tuning.given, tuning.global_batch, devices, lambda choices: _probe(tuning, before, choices)
    )
    rows, parts = fit.rows, fit.parts
    global_batch = rows * parts * devices
    recipe = before.with_choices(fit.choices)
    epochs, why = _epochs(tuning, global_batch)
    steps = tuning.given("runner_config.train_steps") or epochs * max(1, tuning.samples // global_batch)
    if tuning.method == "adalora":
        recipe = recipe.with_choices(_budget(tuning, steps))
    else:
        recipe = recipe.with_choices([Choice("runner_config.epochs", epochs, f"{why}: {steps} steps")])
    return recipe.with_choices(saving_choices(tuning.case, steps, tuning.held_out > 0))


def _refuse_other_tokenizer(tuning: Tuning) -> None:
    vocabulary = tuning.model.architecture.vocab_size
    if tuning.data.largest_token >= vocabulary:
        raise UserError(
            f"{tuning.model.tokenizer}: gives token {tuning.data.largest_token} to these rows, and the model has "
            f"{vocabulary}; it is the tokenizer of another model"
        )


def _before_the_batch(tuning: Tuning) -> Iterator[Choice]:
    """Yield all that does not depend on how many rows fit."""
    model = tuning.model
    yield Choice("run_mode", "finetune", "the verb")
    yield Choice("output_dir", str(tuning.output.resolve()), "where this file is")
    yield Choice("trainer.model_name", tuning.output.resolve().name, "in the log")
    yield Choice("load_checkpoint", str(model.weights.resolve()), "the model")
    yield from model.choices()
    yield from device_choices(model, tuning.case.device)
    yield from layout_choices(devices_here(), sharded_state=tuning.method == "full")
    length, why = tuning.length
    yield Choice("model.model_config.seq_length", length, why)
    if tuning.case.device != CPU and tuning.method in (*ADAPTERS, "adalora", "adapter", *PREFERENCES):
        yield Choice(f"{PET}.frozen_dtype", model.dtype, "frozen weights are only read")
    yield from _data(tuning)
    yield from rate_choices(tuning.case, tuning.given, _limits(model))


def _data(tuning: Tuning) -> Iterator[Choice]:
    data, held_out = tuning.data, tuning.held_out
    paths = list(data.paths) if len(data.paths) > 1 else data.paths[0]
    preferred = "answers that are desirable or not" if tuning.method == UNPAIRED else "pairs of answers"
    yield Choice(f"{DATA}.type", data.loader, preferred if data.loader == PAIRS_LOADER else "conversations")
    yield Choice(f"{DATA}.config.data_path", paths, f"{data.rows} rows")
    split = f"{tuning.trained_rows},{held_out}" if held_out else "1"
    why = f"the last {held_out} rows are evaluated" if held_out else "too few rows to hold any out"
    yield Choice(f"{DATA}.config.split", split, why)
    if data.loader == CONVERSATIONS:
        yield Choice(f"{DATA}.config.handler", data.handler, "by the keys of the first rows")
        yield Choice(f"{DATA}.config.packing", *tuning.packing)
    if tuning.skip_bad_rows:
        yield Choice(f"{DATA}.config.skip_bad_rows", True, f"asked for; {data.bad} of the rows looked at")


def _limits(model: ModelSource) -> dict[str, int]:
    """The most that a key of the method may be with this model."""
    layers = model.architecture.base.architecture.layers
    narrowest = min(min(shape) for layer in layers for shape in layer.adaptable().values())
    blocks = max(count for count in range(1, min(4, len(layers)) + 1) if len(layers) % count == 0)
    return {
        f"{PET}.lora_rank": narrowest,
        f"{PET}.adalora_init_r": narrowest,
        f"{PET}.adalora_target_r": narrowest,
        f"{PET}.galore_rank": narrowest,
        f"{PET}.adapter_length": model.architecture.hidden_size,
        f"{PET}.lisa_activated_layers": len(layers),
        f"{PET}.num_new_blocks": blocks,
    }


def _probe(tuning: Tuning, recipe: Recipe, choices: list[Choice]) -> Any:
    """The run so far as one that the formula of memory knows: pairs as conversations of their length, and some steps."""
    from mindllm.config import load_config

    probed = recipe.with_choices([*choices, Choice("runner_config.train_steps", PROBED_STEPS, "")])
    kept = [choice for choice in probed.choices if not choice.key.startswith("preference.")]
    kept = [replace(choice, value=CONVERSATIONS) if choice.key == f"{DATA}.type" else choice for choice in kept]
    _, overrides = split_overrides(tuning.overrides, lambda key: key.startswith("preference."))
    return load_config(Recipe("", BASE, tuple(kept)).tree(), overrides)


def _epochs(tuning: Tuning, global_batch: int) -> tuple[int, str]:
    if asked := tuning.epochs or tuning.given("runner_config.epochs"):
        return asked, "asked for"
    usual, most, least = (tuning.figure(name) for name in ("epochs", "most epochs", "least steps"))
    steps = max(1, tuning.samples // global_batch)
    wanted = min(most, max(usual, math.ceil(least / steps)))
    return wanted, "more than the usual, as rows are few" if wanted > usual else "passes over the rows"


def _budget(tuning: Tuning, steps: int) -> list[Choice]:
    """AdaLoRA's ranks fall to the end of the run, so its steps must be known."""
    before, after = (int(tuning.figure(f"adalora steps {when}") * steps) for when in ("before", "after"))
    return [
        Choice("runner_config.train_steps", steps, "the budget of ranks falls until the end"),
        Choice(f"{PET}.adalora_tinit", before, "steps before the first ranks are removed"),
        Choice(f"{PET}.adalora_tfinal", after, "steps with the last choice"),
    ]
