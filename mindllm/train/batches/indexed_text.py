"""Indexed files as the text of a run: one corpus, or several blended."""

from __future__ import annotations

from mindllm.config import RunConfig
from mindllm.config.dataset import IndexedDataConfig
from mindllm.data import (
    BlendedDataset,
    Corpus,
    CorpusSplit,
    DocumentOptions,
    GPTDataset,
    HeldOutDataset,
    JoinedSamples,
    Tokenizer,
    bytes_per_token,
    unigram_loss,
)
from mindllm.data.blend import EndlessDataset
from mindllm.data.loader import SampleSource
from mindllm.errors import UserError


class IndexedText:
    """The corpora a section names. Every one is split by itself, so that each has its part in training and evaluation."""

    def __init__(self, config: RunConfig, section: IndexedDataConfig, tokenizer: Tokenizer | None) -> None:
        self.config = config
        self.section = section
        self.model = config.model.config
        self.corpora = [Corpus(path, tokenizer) for path in section.data_paths]

    def train_dataset(self) -> EndlessDataset:
        """Samples of the train parts; of several, by weight."""
        splits = self._splits("train")
        parts = [
            GPTDataset(split, self.model.seq_length, self.config.seed, self._options(split.corpus)) for split in splits
        ]
        if len(parts) == 1:
            return parts[0]
        return BlendedDataset(parts, self.section.weights or [float(split.token_count) for split in splits])

    def held_out(self, split: str) -> SampleSource:
        """Every token of the part of every corpus, once."""
        parts = [
            HeldOutDataset(part, self.model.seq_length, self._options(part.corpus)) for part in self._splits(split)
        ]
        return parts[0] if len(parts) == 1 else JoinedSamples(parts)

    def unigram_loss(self, split: str) -> float:
        """Of the part of all corpora, by the frequencies in the train parts."""
        return unigram_loss(self._splits("train"), self._splits(split), self.model.vocab_size)

    def bytes_per_token(self, split: str, samples: int) -> float | None:
        """Of what the first ``samples`` held-out samples of the part of all corpora predict."""
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
