"""From a configuration to the batches of a run: its corpus, the split that is trained on and the one held out."""

from __future__ import annotations

from functools import cached_property

from mindllm.config import RunConfig
from mindllm.data import (
    BatchStream,
    Corpus,
    EvaluationStream,
    GPTDataset,
    HeldOutDataset,
    bytes_per_token,
    load_tokenizer,
    unigram_loss,
)
from mindllm.train.evaluation import Evaluator
from mindllm.train.ranks import ALONE, Ranks


class RunData:
    """The text of one run, and the part of every batch that is this rank's. Opening it reads headers only."""

    def __init__(self, config: RunConfig, ranks: Ranks = ALONE) -> None:
        self.config = config
        self.ranks = ranks
        self.section = config.train_dataset.data_loader.config
        if not self.section.data_path:
            raise config.error(
                "train_dataset.data_loader.config.data_path",
                "is empty; give the prefix of indexed files (make them: python -m toolkit.data_preprocess --help)",
            )
        if len(self.section.data_paths) > 1:
            raise config.error(
                "train_dataset.data_loader.config.data_path", "one prefix is supported, several are not yet"
            )
        vocabulary = config.processor.tokenizer.vocab_file
        tokenizer = load_tokenizer(vocabulary) if vocabulary else None
        self.model = config.model.config
        if tokenizer is not None and tokenizer.vocab_size > self.model.vocab_size:
            raise config.error(
                "model.model_config.vocab_size",
                f"the tokenizer {vocabulary} has {tokenizer.vocab_size} tokens, more than {self.model.vocab_size}",
            )
        self.corpus = Corpus(self.section.data_paths[0], tokenizer)

    @cached_property
    def dataset(self) -> GPTDataset:
        """Samples of the train split."""
        return GPTDataset(
            self.corpus.split("train", self.section.split),
            self.model.seq_length,
            self.config.seed,
            eod_id=self.corpus.eod_id,
            eod_mask_loss=self.section.eod_mask_loss,
        )

    @property
    def steps_per_epoch(self) -> int:
        """Whole global batches in one pass over the train split; at least 1."""
        return max(1, self.dataset.samples_per_epoch // self.config.global_batch_size)

    @property
    def total_steps(self) -> int:
        """Steps of the whole run: ``runner_config.train_steps``, or ``epochs`` passes."""
        runner = self.config.runner_config
        return runner.train_steps or runner.epochs * self.steps_per_epoch

    def train_stream(self) -> BatchStream:
        """This rank's rows of the global batches of the run, by step."""
        return BatchStream(
            self.dataset,
            self.config.global_batch_size,
            rank=self.ranks.rank,
            rank_count=self.ranks.count,
            vocab_size=self.model.vocab_size,
        )

    def evaluator(self, progress: bool = False) -> Evaluator:
        """Evaluates on the held-out split that ``eval_dataset`` names."""
        section = self.config.eval_dataset
        held_out = self.corpus.split(section.split, self.section.split)
        stream = EvaluationStream(
            HeldOutDataset(held_out, self.model.seq_length, eod_id=self.corpus.eod_id),
            (section.batch_size or self.config.runner_config.batch_size) * self.ranks.count,
            max_batches=section.max_batches,
            rank=self.ranks.rank,
            rank_count=self.ranks.count,
            vocab_size=self.model.vocab_size,
        )
        baseline = unigram_loss(self.corpus.split("train", self.section.split), held_out, self.model.vocab_size)
        return Evaluator(stream, baseline, bytes_per_token(held_out), progress)
