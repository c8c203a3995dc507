"""Sections about text: ``train_dataset``, ``eval_dataset`` and ``processor`` (the tokenizer)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from mindllm.config.section import List, PositiveInt, Section

SPLIT_PATTERN = r"^\s*\d+(\.\d+)?(\s*,\s*\d+(\.\d+)?){0,2}\s*$"
Weight = Annotated[float, Field(gt=0)]


class DataConfig(Section):
    """What every ``train_dataset.data_loader.config`` has: files, and which of their documents are held out."""

    data_path: str | List[str] = Field(default="", description="A file or directory, or a list of them.")
    split: str = Field(
        default="949,50,1",
        pattern=SPLIT_PATTERN,
        description="Weights of the train, valid and test parts of the documents.",
    )

    @property
    def data_paths(self) -> tuple[str, ...]:
        """The paths, as a tuple in every case."""
        return (self.data_path,) if isinstance(self.data_path, str) else tuple(map(str, self.data_path))

    @property
    def split_weights(self) -> tuple[float, float, float]:
        """Weights of train, valid and test as they are written; those left out are 0."""
        train, valid, test = [*map(float, self.split.split(",")), 0.0, 0.0][:3]
        return train, valid, test


class IndexedDataConfig(DataConfig):
    """Indexed files, blended, and how the documents that meet in a sample are kept apart."""

    data_path: str | List[str | Weight] = Field(  # type: ignore[assignment]
        default="",
        description="Prefix of the indexed files (`prefix.bin`, `prefix.idx`), a list of prefixes, or a list of weights and "
        "prefixes in turn: `[0.3, a, 0.7, b]`. Without weights, samples are drawn in proportion to the tokens.",
    )
    eod_mask_loss: bool = Field(
        default=False, description="Leaves the prediction after an end-of-document token out of the loss."
    )
    reset_position_ids: bool = Field(default=False, description="Positions begin at 0 in every document of a sample.")
    reset_attention_mask: bool = Field(
        default=False, description="Tokens of a sample see those of their own document only."
    )

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
        """Prefixes, and weights as numbers: Megatron's command line writes them as text."""
        entries = (self.data_path,) if isinstance(self.data_path, str) else self.data_path
        return entries if len(entries) < 2 else tuple(_number_or_text(entry) for entry in entries)

    @property
    def data_paths(self) -> tuple[str, ...]:
        """The prefixes without their weights."""
        return tuple(entry for entry in self._entries if isinstance(entry, str))

    @property
    def weights(self) -> tuple[float, ...] | None:
        """The weight of each prefix; None: in proportion to their tokens."""
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
        description="MindRecord file, or a list of them, with a column `input_ids` of `seq_length` + 1 tokens, and perhaps "
        "`labels` (or `target_ids`) of as many, -100 where there is no loss.",
    )
    shifted_labels: bool = Field(
        default=False,
        description="Rows have `seq_length` tokens, and `labels[i]` is the token behind `input_ids[i]`, as MindFormers reads "
        "them with `input_sliced_sig: true`; a column `loss_mask` of 0 and 1 says where there is a loss, beside labels of -100.",
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
        description="Jinja file of the chat template; empty: the tokenizer's own, else a plain one (`### Instruction:`).",
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict,
        description="Further variables of the chat template, such as `{enable_thinking: false}`; those that a row has under "
        "`chat_template_kwargs` take precedence.",
    )
    allowed_special_tokens: List[str] = Field(
        default=(),
        description="Special tokens that messages may contain, such as `[<think>, </think>]`; the names of all others are "
        "encoded as words.",
    )
    skip_bad_rows: bool = Field(
        default=False,
        description="Leaves out rows that cannot be used (not JSON, of another form, refused by the template, or with a call, a "
        "tool or a text that the template leaves out) and counts them; false: they are named before the run begins, and end it.",
    )
    max_rows: PositiveInt | None = Field(default=None, description="Only the first rows are read; null: all.")

    @property
    def chat(self) -> dict[str, Any]:
        """The keys that say how conversations are written, as arguments of rows and templates."""
        return {key: getattr(self, key) for key in ("chat_template", "chat_template_kwargs", "allowed_special_tokens")}


class PreferenceDataConfig(ConversationDataConfig):
    """Pairs: a conversation that is answered in two ways, of which one was preferred; or one answer, desirable or not."""


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
        description="Form of the rows; auto: alpaca, sharegpt, messages or prompt, by the keys they have.",
    )
    packing: bool | Literal["joined"] = Field(
        default=False,
        description="Several conversations in one sample. true: they do not see each other; joined: "
        "they do, as one text.",
    )


class IndexedDataLoader(Section):
    """Section ``train_dataset.data_loader``: documents of indexed files."""

    type: Literal["BlendedMegatronDatasetDataLoader"] = Field(
        default="BlendedMegatronDatasetDataLoader", description="Samples of fixed length from Megatron's indexed files."
    )
    config: IndexedDataConfig = Field(default_factory=IndexedDataConfig, description="Files and split.")


class RowsDataLoader(Section):
    """Section ``train_dataset.data_loader``: rows of MindRecord files."""

    type: Literal["MindDataset"] = Field(default="MindDataset", description="Samples as MindRecord files hold them.")
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
        description="Pairs of answers, of which one was preferred (DPO), or answers that are desirable or not (KTO).",
    )
    config: PreferenceDataConfig = Field(default_factory=PreferenceDataConfig, description="Files.")


DataLoader = Annotated[
    IndexedDataLoader | RowsDataLoader | InstructionDataLoader | PreferenceDataLoader, Field(discriminator="type")
]


class TrainDatasetConfig(Section):
    """Section ``train_dataset``."""

    data_loader: DataLoader = Field(
        default_factory=IndexedDataLoader, description="Where samples come from; its keys depend on `type`."
    )

    @model_validator(mode="before")
    @classmethod
    def _indexed_unless_it_says_otherwise(cls, data: Any) -> Any:
        loader = data.get("data_loader") if isinstance(data, dict) else None
        if isinstance(loader, dict) and "type" not in loader:
            return {**data, "data_loader": {"type": "BlendedMegatronDatasetDataLoader", **loader}}
        return data

    @property
    def document_columns(self) -> tuple[str, ...]:
        """What batches have beside inputs, labels and loss mask, to keep the documents of a row apart."""
        loader = self.data_loader
        if isinstance(loader, IndexedDataLoader):
            asked = {
                "segment_starts": loader.config.reset_attention_mask,
                "position_ids": loader.config.reset_position_ids,
            }
            return tuple(column for column, is_asked in asked.items() if is_asked)
        packed = isinstance(loader, InstructionDataLoader) and loader.config.packing is True
        packed = packed or isinstance(loader, PreferenceDataLoader)
        return ("segment_starts", "position_ids") if packed else ()


class EvalDatasetConfig(Section):
    """Section ``eval_dataset``: which part of the training files is held out for evaluation, and how it is read."""

    split: Literal["valid", "test"] = Field(default="valid", description="Part of the documents that is evaluated.")
    batch_size: PositiveInt | None = Field(
        default=None, description="Samples per data-parallel replica and evaluation step; null: that of training."
    )
    max_batches: int = Field(default=0, ge=0, description="Evaluation steps; 0: the whole part.")


TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "qwen.tiktoken",
    "vocab.json",
)  # of a directory, the first that is there


class TokenizerConfig(Section):
    """Section ``processor.tokenizer``."""

    vocab_file: str = Field(
        default="",
        description="`tokenizer.json`, a SentencePiece `tokenizer.model`, `qwen.tiktoken`, or `vocab.json` with `merges.txt`.",
    )


class ProcessorConfig(Section):
    """Section ``processor``."""

    tokenizer: TokenizerConfig = Field(default_factory=TokenizerConfig, description="The tokenizer.")
