"""Sections about text: ``train_dataset``, ``eval_dataset`` and ``processor`` (the tokenizer)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mindllm.config.section import List, PositiveInt, Section


class DataConfig(Section):
    """Section ``train_dataset.data_loader.config``."""

    data_path: str | List[str] = Field(
        default="", description="Prefix of the indexed files (`prefix.bin`, `prefix.idx`), or a list of prefixes."
    )
    split: str = Field(
        default="949,50,1",
        pattern=r"^\s*\d+(\.\d+)?(\s*,\s*\d+(\.\d+)?){0,2}\s*$",
        description="Weights of the train, valid and test parts of the documents.",
    )
    eod_mask_loss: bool = Field(
        default=False, description="Leaves the prediction after an end-of-document token out of the loss."
    )

    @property
    def data_paths(self) -> tuple[str, ...]:
        """The prefixes, as a tuple in every case."""
        return (self.data_path,) if isinstance(self.data_path, str) else self.data_path

    @property
    def split_weights(self) -> tuple[float, float, float]:
        """Weights of train, valid and test as they are written; those left out are 0."""
        train, valid, test = [*map(float, self.split.split(",")), 0.0, 0.0][:3]
        return train, valid, test


class DataLoaderConfig(Section):
    """Section ``train_dataset.data_loader``."""

    type: Literal["BlendedMegatronDatasetDataLoader"] = Field(
        default="BlendedMegatronDatasetDataLoader", description="Samples of fixed length from Megatron's indexed files."
    )
    config: DataConfig = Field(default_factory=DataConfig, description="Files and split.")


class TrainDatasetConfig(Section):
    """Section ``train_dataset``."""

    data_loader: DataLoaderConfig = Field(default_factory=DataLoaderConfig, description="Where samples come from.")


class EvalDatasetConfig(Section):
    """Section ``eval_dataset``: which part of the training files is held out for evaluation, and how it is read."""

    split: Literal["valid", "test"] = Field(default="valid", description="Part of the documents that is evaluated.")
    batch_size: PositiveInt | None = Field(
        default=None, description="Samples per data-parallel replica and evaluation step; null: that of training."
    )
    max_batches: int = Field(default=0, ge=0, description="Evaluation steps; 0: the whole part.")


class TokenizerConfig(Section):
    """Section ``processor.tokenizer``."""

    vocab_file: str = Field(default="", description="`tokenizer.json` or a SentencePiece `tokenizer.model`.")


class ProcessorConfig(Section):
    """Section ``processor``."""

    tokenizer: TokenizerConfig = Field(default_factory=TokenizerConfig, description="The tokenizer.")
