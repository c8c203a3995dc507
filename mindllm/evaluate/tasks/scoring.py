"""What the tasks beside this file do with questions and answers; ``modellink_*`` score as ModelLink's ``evaluation.py`` does."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mindllm.evaluate.code import passes

LETTERS = "ABCD"
SUBJECTS_OF_CEVAL = Path(__file__).with_name("ceval_subjects.txt")
Doc = Mapping[str, Any]


def mmlu_with_examples(**_: Any) -> dict[str, Any]:
    """All subjects of MMLU as one task: each question with the five examples of its subject in ``examples``."""
    import datasets

    whole = datasets.load_dataset("cais/mmlu", "all")
    solved: dict[str, list[str]] = {}
    for doc in whole["dev"]:
        solved.setdefault(doc["subject"], []).append(f"{_mmlu_question(doc)} {LETTERS[doc['answer']]}")
    heads = {
        subject: f"The following are multiple choice questions (with answers) about {subject.replace('_', ' ')}."
        for subject in set(whole["test"]["subject"])
    }
    return {
        "test": whole["test"].map(
            lambda doc: {"examples": "\n\n".join([heads[doc["subject"]], *solved.get(doc["subject"], [])[:5]])}
        )
    }


def mmlu_prompt(doc: Doc) -> str:
    """Examples, then the question."""
    return f"{doc['examples']}\n\n{_mmlu_question(doc)}"


def mmlu_results(doc: Doc, results: Sequence[str]) -> dict[str, float]:
    """Right where the first letter with a point behind it is the answer's, or else the letter the text begins with."""
    said = re.match(r".*([A|B|C|D])\..*", results[0]) or re.match(r"([A|B|C|D])", results[0].lstrip())
    return {"acc": float(said is not None and said.group(1) == LETTERS[doc["answer"]])}


def ceval_with_examples(**_: Any) -> dict[str, Any]:
    """All subjects of C-Eval's validation part as one task, each question with its subject's five examples."""
    import datasets

    parts = []
    for subject in SUBJECTS_OF_CEVAL.read_text().split():
        whole = datasets.load_dataset("ceval/ceval-exam", subject)
        examples = "\n\n".join(f"{_ceval_question(doc)}{doc['answer']}" for doc in list(whole["dev"])[:5])
        parts.append(whole["val"].add_column("examples", [examples] * len(whole["val"])))
    return {"val": datasets.concatenate_datasets(parts)}


def ceval_prompt(doc: Doc) -> str:
    """Examples, then the question."""
    return f"{doc['examples']}\n\n{_ceval_question(doc)}"


def gsm8k_target(doc: Doc) -> str:
    """The steps of a solution without the marks of a calculator, and a sentence that says the number."""
    steps, number = doc["answer"].split("####")
    return f"{re.sub('<<.*?>>', '', steps).strip()}\nThe answer is {number.strip()}."


def gsm8k_results(doc: Doc, results: Sequence[str]) -> dict[str, float]:
    """Right where the number after ``The answer is`` is the last line's of the solution."""
    plain = re.sub(r"[$,.;]", "", results[0]) + " "
    said = re.search(r"The answer is (.*?)\s", plain)
    wanted = doc["answer"].split("####")[1].strip().replace(",", "")
    return {"acc": float(said is not None and said.group(1) == wanted)}


def whole_programs(resps: list[list[str]], docs: Sequence[Doc]) -> list[list[str]]:
    """What the model wrote after the beginnings of the problems, with those; of a block of Markdown its inside."""
    return [[doc["prompt"] + text.split("```")[0] for text in texts] for texts, doc in zip(resps, docs, strict=True)]


def pass_at_1(doc: Doc, results: Sequence[Any]) -> dict[str, float]:
    """The part of the programs that pass the problem's test."""
    programs = results[0] if isinstance(results[0], list) else [results[0]]
    test = f"{doc['test']}\ncheck({doc['entry_point']})"
    passed = [passes(program, test, given=doc["prompt"], entry=doc["entry_point"]) for program in programs]
    return {"pass@1": sum(passed) / len(passed)}


def _mmlu_question(doc: Doc) -> str:
    choices = [f"{letter}. {choice}" for letter, choice in zip(LETTERS, doc["choices"], strict=True)]
    return "\n".join([doc["question"].strip(), *choices, "Answer:"])


def _ceval_question(doc: Doc) -> str:
    return "\n".join([doc["question"].strip(), *(f"{letter}. {doc[letter]}" for letter in LETTERS), "答案："])
