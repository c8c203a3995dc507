"""AGIEval and BIG-Bench Hard as ModelLink's ``evaluation.py`` scores them: the first line that is written is the answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lm_eval.tasks
import yaml

LETTERS = "ABCDEFGHIJ"
EXAMPLES = 3  # before each question
HARNESS_EXAMPLES = Path(lm_eval.tasks.__file__).parent / "bbh" / "fewshot"
AGIEVAL_CLOZE = ("gaokao-mathcloze", "math")  # subjects whose answer is not one of several choices
AGIEVAL_SUBJECTS = (
    "aqua-rat",
    "gaokao-biology",
    "gaokao-chemistry",
    "gaokao-chinese",
    "gaokao-english",
    "gaokao-geography",
    "gaokao-history",
    *AGIEVAL_CLOZE,
    "gaokao-mathqa",
    "gaokao-physics",
    "jec-qa-ca",
    "jec-qa-kd",
    "logiqa-en",
    "logiqa-zh",
    "lsat-ar",
    "lsat-lr",
    "lsat-rc",
    "sat-en",
    "sat-en-without-passage",
    "sat-math",
)
Doc = Mapping[str, Any]


def agieval_with_examples(**_: Any) -> dict[str, Any]:
    """All subjects of AGIEval as one task; the first three questions of a subject are the examples before its others."""
    import datasets

    parts = []
    for subject in AGIEVAL_SUBJECTS:
        docs = list(datasets.load_dataset(f"hails/agieval-{subject}")["test"])
        examples = "\n\n".join(f"{doc['query']} {agieval_label(doc)}" for doc in docs[:EXAMPLES])
        parts += [
            {"subject": subject, "examples": examples, "query": doc["query"], "label": agieval_label(doc)}
            for doc in docs[EXAMPLES:]
        ]
    return {"test": datasets.Dataset.from_list(parts)}


def agieval_label(doc: Doc) -> str:
    """``B``; of a question with several right choices ``A,C``; of one without choices what is to be written, without ``$``."""
    if "gold" in doc:
        return ",".join(LETTERS[place] for place in doc["gold"])
    return str(doc["answer"]).replace("$", "")


def agieval_results(doc: Doc, results: Sequence[str]) -> dict[str, float]:
    """Right where the first line, without dollars and round brackets, is the label."""
    said = first_line(results[0]).replace("$", "").replace("(", "").replace(")", "")
    return {"acc": float(said == doc["label"])}


def bbh_with_examples(**_: Any) -> dict[str, Any]:
    """All tasks of BIG-Bench Hard as one; the three examples of each are those that the harness has of it, answers alone."""
    import datasets

    parts = []
    for path in sorted(HARNESS_EXAMPLES.glob("*.yaml")):
        task = yaml.safe_load(path.read_text(encoding="utf-8"))
        if "dataset_name" not in task:  # the group of them
            continue
        solved = [_bbh_question(doc) + f" {doc['target']}\n\n" for doc in task["fewshot_config"]["samples"]]
        examples = task["description"] + "".join(solved[:EXAMPLES])
        docs = datasets.load_dataset("SaylorTwift/bbh", task["dataset_name"])["test"]
        parts.append(docs.add_column("examples", [examples] * len(docs)))
    return {"test": datasets.concatenate_datasets(parts)}


def bbh_prompt(doc: Doc) -> str:
    """Examples, then the question."""
    return doc["examples"] + _bbh_question(doc)


def bbh_results(doc: Doc, results: Sequence[str]) -> dict[str, float]:
    """Right where the first line is the answer."""
    return {"acc": float(first_line(results[0]) == doc["target"])}


def first_line(text: str) -> str:
    """The first line of what was written, after the space with which it begins."""
    return next(iter(text.strip().splitlines()), "").rstrip()


def _bbh_question(doc: Doc) -> str:
    return f"Q: {doc['input']}\nA:"
