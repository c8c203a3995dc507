"""From text to batches: tokenizers, corpora, conversations, sampling. A dataset is a function of (seed, sample number).

``Corpus(prefix, tokenizer).split("train")`` gives documents, ``GPTDataset`` samples of them, ``BatchStream`` batches by step.
``InstructionRows`` reads conversations, ``RowDataset`` makes samples of them.
"""

from mindllm.data.chat.instruction import InstructionRows
from mindllm.data.chat.pairs import AnswerRows, HeldOutPairs, PairDataset, PairRows
from mindllm.data.corpus import (
    Corpus,
    CorpusSplit,
    CorpusWriter,
    bits_per_byte,
    bytes_per_token,
    split_ranges,
    unigram_loss,
)
from mindllm.data.documents import DocumentOptions
from mindllm.data.gpt import GPTDataset, HeldOutDataset
from mindllm.data.indexed import IndexedDataset, IndexedWriter
from mindllm.data.loader import Batch, BatchStream, BlendedDataset, EvaluationStream, JoinedSamples
from mindllm.data.mind_record import MindRecordRows
from mindllm.data.rows import HeldOutRows, Packs, RowDataset, RowSource, pack
from mindllm.data.tokenizers.tokenizer import Tokenizer, load_tokenizer, run_tokenizer

__all__ = [
    "AnswerRows",
    "Batch",
    "BatchStream",
    "BlendedDataset",
    "Corpus",
    "CorpusSplit",
    "CorpusWriter",
    "DocumentOptions",
    "EvaluationStream",
    "GPTDataset",
    "HeldOutDataset",
    "HeldOutPairs",
    "HeldOutRows",
    "IndexedDataset",
    "IndexedWriter",
    "InstructionRows",
    "JoinedSamples",
    "MindRecordRows",
    "Packs",
    "PairDataset",
    "PairRows",
    "RowDataset",
    "RowSource",
    "Tokenizer",
    "bits_per_byte",
    "bytes_per_token",
    "load_tokenizer",
    "pack",
    "run_tokenizer",
    "split_ranges",
    "unigram_loss",
]
