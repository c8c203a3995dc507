"""Training a network from new weights on text that a person names: the run, each choice with its reason."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mindllm.config.precision import FLOAT32
from mindllm.config.reading.document import at
from mindllm.config.reading.overrides import Overrides
from mindllm.recipes.common import batch_choices, layout_choices, rate_choices, saving_choices, usable_devices
from mindllm.recipes.corpus import PreparedText
from mindllm.recipes.device import CPU, device_here, devices_here
from mindllm.recipes.network import Network
from mindllm.recipes.rates import PRETRAIN, Case, figure
from mindllm.recipes.recipe import Choice, Recipe, override_keys

LOADER = "train_dataset.data_loader.config"
SHORTEST, STEP = 64, 64  # tokens of a sample, and what it is a multiple of
FEWEST_SAMPLES = 8  # of a pass, of very little text
PADDED = 1.02  # times a tokenizer that a vocabulary may have: one that is padded for devices


def vocabulary(network: Network, text_bytes: int) -> int:
    """Return how many tokens a tokenizer has that is trained on so much text: at most those of the network."""
    wanted = figure("vocabulary", Case(PRETRAIN, network.architecture.parameter_count(), text_bytes, device_here()))
    return min(wanted, network.architecture.vocab_size)


@dataclass(frozen=True)
class Pretraining:
    """What a run is chosen by: the network, the text, where it is written, and what a person asked for besides."""

    network: Network
    text: PreparedText
    output: Path
    overrides: Overrides = ()
    epochs: int | None = None

    @cached_property
    def asked(self) -> Mapping[str, Any]:
        """The keys that a person gives."""
        return override_keys(self.network.base, self.overrides)

    def given(self, key: str) -> Any:
        """What a person gives for a dotted key, or None."""
        return at(self.asked, tuple(key.split(".")))

    @property
    def own_vocabulary(self) -> bool:
        """Whether the network has to have the tokens of another tokenizer than its own."""
        tokens, has = self.text.tokenizer.vocab_size, self.network.architecture.vocab_size
        return not tokens <= has <= PADDED * tokens

    @cached_property
    def parameters(self) -> int:
        """Of the network with the vocabulary of the text."""
        architecture = self.network.architecture
        if self.own_vocabulary:
            architecture = architecture.model_copy(update={"vocab_size": self.text.tokenizer.vocab_size})
        return architecture.parameter_count()

    @cached_property
    def case(self) -> Case:
        """What rows of the table are about."""
        return Case(PRETRAIN, self.parameters, self.text.summary.meta.documents, device_here())

    def figure(self, name: str) -> Any:
        """A figure of the table."""
        return figure(name, self.case)

    @property
    def holds_out(self) -> bool:
        """Whether documents are evaluated and not trained on."""
        return self.text.summary.meta.documents >= self.figure("rows to hold any out")

    @property
    def tokens(self) -> int:
        """Of a pass, about."""
        part = 1 - self.figure("held out") * self.holds_out
        return max(1, int(self.text.summary.meta.tokens * part))

    @cached_property
    def length(self) -> tuple[int, str]:
        """Tokens of a sample, and why."""
        if given := self.given("model.model_config.seq_length"):
            return given, "asked for"
        context, most = self.network.architecture.max_position_embedding, self.figure("longest row")
        of_text = max(SHORTEST, self.tokens // FEWEST_SAMPLES // STEP * STEP)
        if of_text < min(context, most):
            return of_text, f"{self.tokens:,} tokens are few"
        return min(context, most), "the context of the model" if context <= most else f"the model takes up to {context}"

    @cached_property
    def passes(self) -> tuple[int, str]:
        """Over the text, and why."""
        if asked := self.epochs or self.given("runner_config.epochs"):
            return asked, "asked for"
        wanted = self.figure("tokens of a parameter") * self.parameters
        epochs = min(self.figure("most epochs"), max(self.figure("epochs"), math.ceil(wanted / self.tokens)))
        many = self.figure("tokens of a parameter")
        return epochs, f"{self.tokens / self.parameters:.2g} tokens of text for a parameter; {many} would be many"

    @cached_property
    def global_batch(self) -> int:
        """Samples of a step over all devices."""
        length, devices = self.length[0], usable_devices(devices_here())
        usual = self.figure("tokens of a step") // length
        few = self.tokens * self.passes[0] // length // self.figure("least steps")
        return max(1, min(usual, few) // devices) * devices


def pretrain_recipe(run: Pretraining, command: str) -> Recipe:
    """Return the run that trains a network from new weights.

    Raises:
        UserError: it does not fit this machine.
    """
    from mindllm.config import load_config

    before = Recipe(command, run.network.base, tuple(_before_the_batch(run)))
    devices = usable_devices(devices_here())
    batch = batch_choices(
        run.case,
        run.given,
        run.global_batch,
        devices,
        lambda choices: load_config(before.with_choices(choices).tree(), run.overrides),
    )
    samples = max(1, run.tokens // run.length[0])
    epochs, why = run.passes
    steps = run.given("runner_config.train_steps") or epochs * max(1, samples // (batch.rows * batch.parts * devices))
    recipe = before.with_choices(batch.choices)
    recipe = recipe.with_choices([Choice("runner_config.epochs", epochs, f"{why}: {steps} steps")])
    return recipe.with_choices(saving_choices(run.case, steps, run.holds_out))


def _before_the_batch(run: Pretraining) -> Iterator[Choice]:
    """Yield all that does not depend on how many rows fit."""
    yield Choice("run_mode", "train", "the verb")
    yield Choice("output_dir", str(run.output.resolve()), "where this file is")
    yield Choice("trainer.model_name", run.output.resolve().name, "in the log")
    yield from run.network.one_device()
    yield from run.network.choices(run.own_vocabulary, run.text.tokenizer.vocab_size)
    yield Choice("context.device_target", run.case.device, "what is here")
    if run.case.device == CPU:
        yield Choice("model.model_config.compute_dtype", FLOAT32, "a CPU has few kernels for narrower types")
    yield from layout_choices(devices_here(), sharded_state=True)
    yield Choice("model.model_config.seq_length", *run.length)
    trained = "trained on this text" if run.text.trained else "that of the text"
    yield Choice("processor.tokenizer.vocab_file", str(run.text.tokenizer_file.resolve()), trained)
    yield Choice(f"{LOADER}.data_path", str(run.text.prefix.resolve()), run.text.describe())
    held_out = run.figure("held out")
    split = f"{100 * (1 - held_out):g},{100 * held_out:g}" if run.holds_out else "1"
    yield Choice(
        f"{LOADER}.split", split, "the rest is evaluated" if run.holds_out else "too few documents to hold any out"
    )
    yield from rate_choices(run.case, run.given, {})
