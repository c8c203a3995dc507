"""What ``--like`` names: a shipped configuration, a YAML, a Hugging Face directory, a GGUF file, or what a run has trained."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mindllm.config import (
    ModelConfig,
    ParallelConfig,
    RecomputeConfig,
    RunConfig,
    load_config,
    read_model_config,
)
from mindllm.config.reading.load import BASE as BASE_KEY
from mindllm.config.reading.shipped import shipped_configs
from mindllm.config.recompute import SwapConfig
from mindllm.errors import LONGEST_PART, UserError, bounded, nearest
from mindllm.families.hugging_face import CONFIG
from mindllm.recipes.model_source import OF_THE_RUN, ModelSource, find_model
from mindllm.recipes.recipe import Choice

BASE = "configs/base/pretrain.yaml"
SHIPPED = "pretrain_"  # how files of shipped networks begin
OF_WEIGHTS = OF_THE_RUN | {"eos_token_id", "quantization_config", "initializer_range"}
"""Keys of a file that are about its weights or its tokenizer, or about a run, not about the network."""


@dataclass(frozen=True)
class Network:
    """A network without weights.

    Attributes:
        name: a short one.
        base: the YAML that a run stands over.
        architecture: as it is named.
        keys: those of ``model.model_config`` that ``base`` does not give.
        directory: the Hugging Face directory, or GGUF file, that gives them, whose tokenizer fits; None: there is none.
        tokenizer: the tokenizer of its weights; empty where none is known.
        config: what ``base`` says of a run, for what has to be said otherwise.
        is_file: whether a person named a YAML, whose keys are the person's.
    """

    name: str
    base: str
    architecture: ModelConfig
    keys: dict[str, Any]
    directory: Path | None
    tokenizer: str
    config: RunConfig | None
    is_file: bool = False

    def choices(self, own_vocabulary: bool, vocab_size: int) -> Iterator[Choice]:
        """Yield the network; with ``own_vocabulary`` it has the tokens of another tokenizer."""
        if self.directory is not None and not own_vocabulary:
            yield Choice(
                "pretrained_model_dir", str(self.directory.resolve()), "the network and its tokenizer; no weights"
            )
            return
        for key, value in self.keys.items():
            yield Choice(f"model.model_config.{key}", value, "")
        if own_vocabulary:
            yield Choice(
                "model.model_config.vocab_size", vocab_size, "tokens of the tokenizer; embedding and head follow"
            )

    def tree(self, output: Path) -> dict[str, Any]:
        """Return it as a run in ``output`` of which nothing else is said."""
        model = {**self.keys, "seq_length": 1} if self.keys else {}
        return {
            BASE_KEY: self.base,
            "output_dir": str(output.resolve()),
            "run_mode": "train",
            "lr_schedule": {"learning_rate": 1.0},
            **({"model": {"model_config": model}} if model else {}),
        }

    def one_device(self) -> Iterator[Choice]:
        """Yield what ``base`` says for other devices than there are, put back."""
        if self.config is None:
            return
        sizes = self.config.parallel_config
        for key, info in ParallelConfig.model_fields.items():
            if getattr(sizes, key) != info.default and key != "data_parallel":
                yield Choice(f"parallel_config.{key}", info.default, "for the devices that are here")
        if sizes.data_parallel != 1:
            yield Choice("parallel_config.data_parallel", 1, "for the devices that are here")
        model = self.config.model.config
        for key in ("offset", "pp_interleave_num"):
            default = ModelConfig.model_fields[key].default
            if getattr(model, key) != default:
                yield Choice(f"model.model_config.{key}", default, "one stage")
        for section, fields in (("recompute_config", RecomputeConfig), ("swap_config", SwapConfig)):
            for key, info in fields.model_fields.items():
                if getattr(getattr(self.config, section), key) != info.default:
                    yield Choice(f"{section}.{key}", info.default, "by the memory that is here")
        if self.config.micro_batch_interleave_num != 1:
            yield Choice("micro_batch_interleave_num", 1, "nothing is exchanged")


def find_network(named: str) -> Network:
    """Return the network of that name, or at that path.

    Raises:
        UserError: there is none; says which names are near.
    """
    path = Path(named)
    if path.name == CONFIG and path.is_file():
        path = path.parent
    if path.suffix in (".yaml", ".yml") and path.is_file():
        return replace(_of_yaml(path, str(path.resolve()), path.stem.removeprefix(SHIPPED)), is_file=True)
    if path.exists():
        model = find_model(path)
        if model.directory is not None:  # the base of an adapter, or what is named
            return _of_directory(model.directory, model)
        return Network(model.name, BASE, model.architecture.base, model.keys(), None, model.tokenizer, None)
    return _shipped(named)


def shipped_networks() -> dict[str, Path]:
    """Return the files of the networks that come with mindllm, by their names."""
    files = shipped_configs().glob(f"*/{SHIPPED}*.yaml")
    return {file.stem.removeprefix(SHIPPED): file for file in sorted(files)}


def _shipped(named: str) -> Network:
    known = shipped_networks()
    name = re.sub(r"[^a-z0-9]+", "_", named.lower().rpartition("/")[2])
    if name not in known:
        shown = bounded(named, LONGEST_PART)
        of_name = [one for one in known if one.startswith(name)]
        hint = (
            f"; shipped are {', '.join(of_name)}" if len(of_name) > 1 else nearest(name, known).partition("; valid")[0]
        )
        more = hint or f"; shipped are {', '.join([*known][:8])}, … ({len(known)} in configs/)"
        raise UserError(f"{shown}: no such directory, and no network of that name is shipped{more}")
    file = known[name]
    return _of_yaml(file, f"configs/{file.parent.name}/{file.name}", name)


def _of_yaml(file: Path, base: str, name: str) -> Network:
    config = load_config(file)
    tokenizer = config.processor.tokenizer.vocab_file
    found = tokenizer if tokenizer and Path(tokenizer).is_file() else ""
    return Network(name, base, config.model.config, {}, None, found, config)


def _of_directory(path: Path, model: ModelSource) -> Network:
    found = read_model_config(path)
    tree = found.model_dump(mode="json", by_alias=True, exclude_unset=True)
    keys = {key: value for key, value in tree.items() if key not in OF_WEIGHTS and value is not None}
    return Network(model.name, BASE, found, keys, path, model.tokenizer, None)
