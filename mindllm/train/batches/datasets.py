"""From a configuration to the batches of a run: the training split and the held-out split of its data.

Indexed files are one corpus or a blend of several.
"""

from __future__ import annotations

from functools import cached_property
from typing import Protocol

from mindllm.config import RunConfig
from mindllm.config.dataset import IndexedDataConfig, IndexedDataLoader, InstructionDataLoader, PreferenceDataLoader
from mindllm.data import (
    BatchStream,
    BlendedDataset,
    Corpus,
    CorpusSplit,
    DocumentOptions,
    EvaluationStream,
    GPTDataset,
    HeldOutDataset,
    JoinedSamples,
    Tokenizer,
    bytes_per_token,
    run_tokenizer,
    unigram_loss,
)
from mindllm.data.loader import EndlessDataset, SampleSource
from mindllm.errors import UserError
from mindllm.terminal.progress import Progress, unwatched
from mindllm.train.batches.row_text import InstructionText, MindRecordText, PreferenceText
from mindllm.train.evaluation import AnswerEvaluationResult, Evaluator, PairEvaluationResult
from mindllm.train.job.ranks import FULL_BATCH, BatchShard


class IndexedText:
    """Indexed corpora of a section. Each corpus is split separately, so that all are part of training and evaluation."""

    def __init__(self, config: RunConfig, section: IndexedDataConfig, tokenizer: Tokenizer | None) -> None:
        self.config = config
        self.section = section
        self.model = config.model.config
        self.corpora = [Corpus(path, tokenizer) for path in section.data_paths]

    def train_dataset(self) -> EndlessDataset:
        """Return samples of the training splits, blended by weight."""
        splits = self._splits("train")
        parts = [
            GPTDataset(split, self.model.seq_length, self.config.seed, self._options(split.corpus)) for split in splits
        ]
        if len(parts) == 1:
            return parts[0]
        return BlendedDataset(parts, self.section.weights or [float(split.token_count) for split in splits])

    def held_out(self, split: str) -> SampleSource:
        """Return samples that cover every token of a split of all corpora once."""
        parts = [
            HeldOutDataset(part, self.model.seq_length, self._options(part.corpus)) for part in self._splits(split)
        ]
        return parts[0] if len(parts) == 1 else JoinedSamples(parts)

    def unigram_loss(self, split: str) -> float:
        """Return the loss of a split by the token frequencies of the training splits, in nats per token."""
        return unigram_loss(self._splits("train"), self._splits(split), self.model.vocab_size)

    def bytes_per_token(self, split: str, samples: int) -> float | None:
        """Return the bytes of text per predicted token over the first ``samples`` held-out samples; None if unknown."""
        splits, counts = self._splits(split), []
        for part in splits:
            length = HeldOutDataset(part, self.model.seq_length, self._options(part.corpus)).sample_count
            counts.append(min(part.token_count, min(samples, length) * self.model.seq_length))
            samples -= min(samples, length)
        return bytes_per_token(splits, counts)

    def _splits(self, name: str) -> list[CorpusSplit]:
        return [corpus.split(name, self.section.split) for corpus in self.corpora]

    def _options(self, corpus: Corpus) -> DocumentOptions:
        section = self.section
        try:
            return DocumentOptions(
                corpus.eod_id, section.eod_mask_loss, section.reset_position_ids, section.reset_attention_mask
            )
        except UserError as error:
            raise UserError(f"{corpus.prefix}: {error}") from None


class Text(Protocol):
    """Text of a data loader section."""

    def train_dataset(self) -> EndlessDataset:
        """Return an endless dataset of the training split."""

    def held_out(self, split: str) -> SampleSource:
        """Return the samples of another split, once."""

    def unigram_loss(self, split: str) -> float | None:
        """Return the unigram loss of a split in nats per token; None if not meaningful."""

    def bytes_per_token(self, split: str, samples: int) -> float | None:
        """Return bytes of text per token over the first ``samples`` held-out samples; None if unknown."""


class RunData:
    """Data of one run, and the rows of every batch that this process reads.

    Opening it reads only headers, and the line offsets of instruction files.
    """

    def __init__(self, config: RunConfig, share: BatchShard = FULL_BATCH, progress: Progress = unwatched) -> None:
        self.config = config
        self.progress = progress
        self.share = share
        # Samples consumed beyond step * global_batch_size, after a resume with another batch size.
        self.sample_offset = 0
        self.model = config.model.config
        if not config.train_dataset.data_loader.config.data_path:
            raise config.error("train_dataset.data_loader.config.data_path", "is empty; pass the files to train on")
        self.tokenizer = run_tokenizer(config) if config.processor.tokenizer.vocab_file else None
        self.text = self._open()

    def _open(self) -> Text:
        loader = self.config.train_dataset.data_loader
        if isinstance(loader, IndexedDataLoader):
            return IndexedText(self.config, loader.config, self.tokenizer)
        if isinstance(loader, InstructionDataLoader | PreferenceDataLoader):
            if self.tokenizer is None:
                raise self.config.error("processor.tokenizer.vocab_file", "is empty; conversations require a tokenizer")
            if isinstance(loader, PreferenceDataLoader):
                return PreferenceText(self.config, loader.config, self.tokenizer, self.progress)
            return InstructionText(self.config, loader.config, self.tokenizer, self.progress)
        return MindRecordText(self.config, loader.config)

    @cached_property
    def dataset(self) -> EndlessDataset:
        """Endless dataset of the training split."""
        return self.text.train_dataset()

    @property
    def steps_per_epoch(self) -> int:
        """Complete global batches in one pass over the training split; at least 1."""
        return max(1, self.dataset.samples_per_epoch // self.config.global_batch_size)

    @property
    def total_steps(self) -> int:
        """Steps of the whole run: ``runner_config.train_steps``, or as many as ``epochs`` passes have."""
        runner, size = self.config.runner_config, self.config.global_batch_size
        samples = runner.epochs * self.steps_per_epoch * size
        return runner.train_steps or max(1, (samples - self.sample_offset) // size)

    @property
    def random_seed(self) -> int | None:
        """Seed of the random keys; None if the model has no dropout."""
        return self.config.seed if self.model.architecture.drops else None

    def train_stream(self) -> BatchStream:
        """Return this process's rows of the global batches, by step."""
        return BatchStream(
            self.dataset,
            self.config.global_batch_size,
            rank=self.share.index,
            rank_count=self.share.count,
            vocab_size=self.model.vocab_size,
            random_seed=self.random_seed,
            offset=self.sample_offset,
        )

    def evaluator(self, rows: int, progress: Progress = unwatched) -> Evaluator:
        """Return an evaluator of the held-out split of ``eval_dataset``, with ``rows`` samples per global batch."""
        section = self.config.eval_dataset
        stream = EvaluationStream(
            self.text.held_out(section.split),
            rows,
            max_batches=section.max_batches,
            rank=self.share.index,
            rank_count=self.share.count,
            vocab_size=self.model.vocab_size,
            random_seed=self.random_seed,
        )
        baseline = self.text.unigram_loss(section.split)
        bytes_per_token = self.text.bytes_per_token(section.split, len(stream) * rows)
        row_result = None
        if self.config.is_preference_tuning:
            row_result = AnswerEvaluationResult if self.config.preference.is_unpaired else PairEvaluationResult
        return Evaluator(stream, baseline, bytes_per_token, progress, row_result)
