"""From text to batches: tokenizers, indexed corpora, sampling. A dataset is a deterministic function of (seed, step).

``Corpus(prefix, tokenizer).split("train")`` gives documents, ``GPTDataset`` samples of them, ``BatchStream`` batches by step.
"""

from mindllm.data.corpus import Corpus, CorpusSplit, CorpusWriter
from mindllm.data.gpt import GPTDataset
from mindllm.data.held_out import HeldOutDataset
from mindllm.data.indexed import IndexedDataset, IndexedWriter
from mindllm.data.loader import Batch, BatchStream, EvaluationStream
from mindllm.data.run_tokenizer import run_tokenizer
from mindllm.data.statistics import bits_per_byte, bytes_per_token, unigram_loss
from mindllm.data.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "Batch",
    "BatchStream",
    "Corpus",
    "CorpusSplit",
    "CorpusWriter",
    "EvaluationStream",
    "GPTDataset",
    "HeldOutDataset",
    "IndexedDataset",
    "IndexedWriter",
    "Tokenizer",
    "bits_per_byte",
    "bytes_per_token",
    "load_tokenizer",
    "run_tokenizer",
    "unigram_loss",
]
