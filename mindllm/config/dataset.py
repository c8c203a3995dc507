"""Sections about text: ``train_dataset``, ``eval_dataset`` and ``processor`` (the tokenizer)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from mindllm.config.section import List, PositiveInt, Section

SPLIT_PATTERN = r"^\s*\d+(\.\d+)?(\s*,\s*\d+(\.\d+)?){0,2}\s*$"
Weight = Annotated[float, Field(gt=0)]


class DataConfig(Section):
    """Keys of every ``train_dataset.data_loader.config``: files and split."""

    data_path: str | List[str] = Field(default="", description="A file or directory, or a list of them.")
    split: str = Field(
        default="949,50,1",
        pattern=SPLIT_PATTERN,
        description="Weights of the train, valid and test parts of the documents.",
    )

    @property
    def data_paths(self) -> tuple[str, ...]:
        """Return the paths as a tuple."""
        return (self.data_path,) if isinstance(self.data_path, str) else tuple(map(str, self.data_path))

    @property
    def split_weights(self) -> tuple[float, float, float]:
        """Return the weights of train, valid and test. Omitted weights are 0."""
        train, valid, test = [*map(float, self.split.split(",")), 0.0, 0.0][:3]
        return train, valid, test


class IndexedDataConfig(DataConfig):
    """Indexed files, blended, and how the documents that meet in a sample are kept apart."""

    data_path: str | List[str | Weight] = Field(  # type: ignore[assignment]
        default="",
        description="Prefix of the indexed files (`prefix.bin`, `prefix.idx`), a list of prefixes, or alternating "
        "weights and prefixes: `[0.3, a, 0.7, b]`. Without weights, samples are drawn in proportion to the "
        "number of tokens.",
    )
    eod_mask_loss: bool = Field(
        default=False, description="Excludes the prediction after an end-of-document token from the loss."
    )
    reset_position_ids: bool = Field(default=False, description="Positions restart at 0 in every document of a sample.")
    reset_attention_mask: bool = Field(default=False, description="Tokens attend only to tokens of the same document.")

    @model_validator(mode="after")
    def _weights_and_paths_in_turn(self) -> IndexedDataConfig:
        entries = self._entries
        weighted = any(isinstance(entry, float) for entry in entries)
        kinds = [isinstance(entry, float) for entry in entries]
        if weighted and kinds != [True, False] * (len(entries) // 2):
            raise PydanticCustomError(
                "blend", "data_path with weights is a list of weight and prefix in turn, such as [0.3, a, 0.7, b]"
            )
        return self

    @property
    def _entries(self) -> tuple[str | float, ...]:
        """Return prefixes and weights. Weights written as text, as on Megatron's command line, become numbers."""
        entries = (self.data_path,) if isinstance(self.data_path, str) else self.data_path
        return entries if len(entries) < 2 else tuple(_number_or_text(entry) for entry in entries)

    @property
    def data_paths(self) -> tuple[str, ...]:
        """Return the prefixes without their weights."""
        return tuple(entry for entry in self._entries if isinstance(entry, str))

    @property
    def weights(self) -> tuple[float, ...] | None:
        """Return the weight of each prefix, or None for weights in proportion to the number of tokens."""
        return tuple(entry for entry in self._entries if isinstance(entry, float)) or None


def _number_or_text(entry: str | float) -> str | float:
    try:
        return float(entry)
    except ValueError:
        return entry


class RowsDataConfig(DataConfig):
    """MindRecord files of ready samples."""

    data_path: str | List[str] = Field(
        default="",
        description="MindRecord file, or a list of files, with a column `input_ids` of `seq_length` + 1 tokens and "
        "optionally a column `labels` (or `target_ids`) of the same length, -100 where there is no loss.",
    )
    shifted_labels: bool = Field(
        default=False,
        description="Rows have `seq_length` tokens, and `labels[i]` follows `input_ids[i]`, as MindFormers reads them "
        "with `input_sliced_sig: true`. Labels of -100, and 0 in an optional column `loss_mask`, have no "
        "loss.",
    )


class ConversationDataConfig(DataConfig):
    """Files of conversations, and what becomes of their rows."""

    data_path: str | List[str] = Field(
        default="",
        description="File of conversations (jsonl, json, parquet, csv; also compressed), a directory, or a list of them.",
    )
    split: str = Field(
        default="1,0,0",
        pattern=SPLIT_PATTERN,
        description="Weights of the train, valid and test parts of the rows.",
    )
    chat_template: str = Field(
        default="",
        description="Jinja file of the chat template; empty: the template of the tokenizer, else a plain one (`### "
        "Instruction:`).",
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict,
        description="Additional variables of the chat template, such as `{enable_thinking: false}`; "
        "`chat_template_kwargs` of a row take precedence.",
    )
    allowed_special_tokens: List[str] = Field(
        default=(),
        description="Special tokens that messages may contain, such as `[<think>, </think>]`; names of other special "
        "tokens are encoded as text.",
    )
    skip_bad_rows: bool = Field(
        default=False,
        description="Skips and counts invalid rows (not JSON, unknown form, rejected by the template, or with a call, "
        "tool or text that the template drops); false: they are reported before the run begins, and end it.",
    )
    max_rows: PositiveInt | None = Field(default=None, description="Number of rows to read; null: all.")

    @property
    def chat(self) -> dict[str, Any]:
        """Return the keys about the form of conversations, as arguments of rows and templates."""
        return {key: getattr(self, key) for key in ("chat_template", "chat_template_kwargs", "allowed_special_tokens")}


class PreferenceDataConfig(ConversationDataConfig):
    """Pairs of answers to a conversation, one preferred; or single answers, desirable or not."""


class InstructionDataConfig(ConversationDataConfig):
    """Conversations, their form, and how they become samples."""

    handler: Literal[
        "auto",
        "alpaca",
        "sharegpt",
        "messages",
        "prompt",
        "GeneralInstructionHandler",
        "BelleMultiTurnInstructionHandler",
        "MOSSMultiTurnHandler",
        "MOSSInstructionHandler",
        "LeetcodePythonInstructionHandler",
        "ADGenInstructionHandler",
    ] = Field(
        default="auto",
        description="Form of the rows; auto: alpaca, sharegpt, messages or prompt, depending on their keys.",
    )
    packing: bool | Literal["joined"] = Field(
        default=False,
        description="Packs several conversations into one sample. true: without attention between them; joined: as one "
        "text.",
    )


class IndexedDataLoader(Section):
    """Section ``train_dataset.data_loader``: documents of indexed files."""

    type: Literal["BlendedMegatronDatasetDataLoader"] = Field(
        default="BlendedMegatronDatasetDataLoader", description="Samples of fixed length from Megatron's indexed files."
    )
    config: IndexedDataConfig = Field(default_factory=IndexedDataConfig, description="Files and split.")


class RowsDataLoader(Section):
    """Section ``train_dataset.data_loader``: rows of MindRecord files."""

    type: Literal["MindDataset"] = Field(default="MindDataset", description="Tokenized samples from MindRecord files.")
    config: RowsDataConfig = Field(default_factory=RowsDataConfig, description="Files and split.")


class InstructionDataLoader(Section):
    """Section ``train_dataset.data_loader``: conversations."""

    type: Literal["CommonDataLoader"] = Field(
        default="CommonDataLoader", description="Conversations, with loss on the turns of the assistant."
    )
    config: InstructionDataConfig = Field(default_factory=InstructionDataConfig, description="Files and their form.")


class PreferenceDataLoader(Section):
    """Section ``train_dataset.data_loader``: pairs of answers, or with `preference.loss_type` kto answers with a label."""

    type: Literal["PreferenceDataLoader"] = Field(
        default="PreferenceDataLoader",
        description="Pairs of answers, one preferred (DPO), or single answers that are desirable or not (KTO).",
    )
    config: PreferenceDataConfig = Field(default_factory=PreferenceDataConfig, description="Files.")


DataLoader = Annotated[
    IndexedDataLoader | RowsDataLoader | InstructionDataLoader | PreferenceDataLoader, Field(discriminator="type")
]


class TrainDatasetConfig(Section):
    """Section ``train_dataset``."""

    data_loader: DataLoader = Field(
        default_factory=IndexedDataLoader, description="Source of samples; its keys depend on `type`."
    )

    @model_validator(mode="before")
    @classmethod
    def _default_to_indexed(cls, data: Any) -> Any:
        loader = data.get("data_loader") if isinstance(data, dict) else None
        if isinstance(loader, dict) and "type" not in loader:
            return {**data, "data_loader": {"type": "BlendedMegatronDatasetDataLoader", **loader}}
        return data

    @property
    def document_columns(self) -> tuple[str, ...]:
        """Return the additional columns of batches that separate the documents of a row."""
        loader = self.data_loader
        if isinstance(loader, IndexedDataLoader):
            options = {
                "segment_starts": loader.config.reset_attention_mask,
                "position_ids": loader.config.reset_position_ids,
            }
            return tuple(column for column, is_set in options.items() if is_set)
        packed = isinstance(loader, InstructionDataLoader) and loader.config.packing is True
        packed = packed or isinstance(loader, PreferenceDataLoader)
        return ("segment_starts", "position_ids") if packed else ()


class EvalDatasetConfig(Section):
    """Section ``eval_dataset``: which part of the training files is held out for evaluation, and how it is read."""

    split: Literal["valid", "test"] = Field(default="valid", description="Part of the documents to evaluate on.")
    batch_size: PositiveInt | None = Field(
        default=None, description="Samples per data-parallel replica and evaluation step; null: as in training."
    )
    max_batches: int = Field(default=0, ge=0, description="Evaluation steps; 0: the complete split.")


TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "qwen.tiktoken",
    "vocab.json",
)  # in order of preference within a directory


class TokenizerConfig(Section):
    """Section ``processor.tokenizer``."""

    vocab_file: str = Field(
        default="",
        description="`tokenizer.json`, a SentencePiece `tokenizer.model`, `qwen.tiktoken`, or `vocab.json` with `merges.txt`.",
    )


class ProcessorConfig(Section):
    """Section ``processor``."""

    tokenizer: TokenizerConfig = Field(default_factory=TokenizerConfig, description="The tokenizer.")
