"""Tiny data sets in the formats of the real ones, and tiny models with a tokenizer whose tokens are characters."""

import json
import string

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import AutoConfig, AutoModelForCausalLM

from mindllm.config.families import FAMILIES

TINY = {name: content for family in FAMILIES for name, content in family.tiny.items()}
END = "<|end|>"
CHARACTERS = [*string.printable[:95], "\n"]
LENGTH = 256
FACTS = [("2+2", "4", "5"), ("sky", "blue", "red"), ("ice", "cold", "hot"), ("1+5", "6", "7"), ("sun", "hot", "icy")]


def write_model(directory, name="llama", seed=0, **changes):
    """A random tiny model of a family with the tokenizer, as a directory of Hugging Face."""
    torch.manual_seed(seed)
    content = dict(TINY[name]) | {"bos_token_id": None, "eos_token_id": 96, "pad_token_id": None} | changes
    for key in ("max_position_embeddings", "n_positions", "seq_length"):
        if key in content:
            content[key] = LENGTH
    config = AutoConfig.for_model(content.pop("model_type"), **content)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.1)
    model.generation_config.eos_token_id = 96
    model.save_pretrained(directory)
    write_tokenizer(directory)
    return directory


def write_tokenizer(directory, template=None):
    vocabulary = {character: place for place, character in enumerate(CHARACTERS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([END])
    tokenizer.save(str(directory / "tokenizer.json"))
    said = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "pad_token": END}
    said |= {"clean_up_tokenization_spaces": False, "model_max_length": LENGTH}
    (directory / "tokenizer_config.json").write_text(
        json.dumps(said | ({"chat_template": template} if template else {}))
    )


def write_data(directory):
    """Every data set the tests ask for, in the layout of the hub."""
    arc = [
        {
            "id": f"q{number}",
            "question": f"What is {asked}?",
            "choices": {"text": [right, wrong] if number % 2 else [wrong, right], "label": ["A", "B"]},
            "answerKey": "A" if number % 2 else "B",
        }
        for number, (asked, right, wrong) in enumerate(FACTS)
    ]
    _dataset(directory / "allenai/ai2_arc", "ARC-Easy", {"train": arc, "validation": arc, "test": arc})
    mmlu = [
        {"question": f"{asked}?", "subject": "abstract_algebra", "choices": [wrong, right, "x", "y"], "answer": 1}
        for asked, right, wrong in FACTS
    ]
    _dataset(directory / "cais/mmlu", "abstract_algebra", {"dev": mmlu, "test": mmlu, "validation": mmlu})
    boolq = [
        {"question": f"is {asked} {right}", "passage": f"The {asked} is {right}.", "idx": number, "label": number % 2}
        for number, (asked, right, _) in enumerate(FACTS)
    ]
    _dataset(directory / "aps/super_glue", "boolq", {"train": boolq, "validation": boolq, "test": boolq})
    gsm8k = [
        {"question": f"Ann has {n} and gets {n + 1}. How many?", "answer": f"{n}+{n + 1}={2 * n + 1}\n#### {2 * n + 1}"}
        for n in range(5)
    ]
    _dataset(directory / "openai/gsm8k", "main", {"train": gsm8k, "test": gsm8k})
    pages = [{"page": "The quick brown fox jumps. " * 14}, {"page": " = Sun = \n It is hot .\n"}]
    _dataset(
        directory / "EleutherAI/wikitext_document_level",
        "wikitext-2-raw-v1",
        {"train": pages, "validation": pages, "test": pages},
    )
    problem = {
        "task_id": "HumanEval/0",
        "prompt": 'def add(a, b):\n    """Adds."""\n',
        "canonical_solution": "    return a + b\n",
        "test": "def check(candidate):\n    assert candidate(2, 3) == 5\n",
        "entry_point": "add",
    }
    _dataset(directory / "openai/openai_humaneval", "openai_humaneval", {"test": [problem]})
    return directory


def _dataset(place, name, splits):
    """A repository of the hub: parquet files, and a README whose head says which are whose."""
    (place / name).mkdir(parents=True)
    for split, rows in splits.items():
        pq.write_table(pa.Table.from_pylist(rows), place / name / f"{split}-00000-of-00001.parquet")
    files = "".join(f"  - split: {split}\n    path: {name}/{split}-*\n" for split in splits)
    (place / "README.md").write_text(f"---\nconfigs:\n- config_name: {name}\n  data_files:\n{files}---\n")
