"""A tiny copy of every data set that the tasks people report on read, under the names and with the columns of the real ones."""

from pathlib import Path

import lm_eval.tasks
import yaml
from tiny_hub import ADDITION, write_dataset

from mindllm.evaluate.tasks.first_line import AGIEVAL_CLOZE, AGIEVAL_SUBJECTS
from mindllm.evaluate.tasks.scoring import SUBJECTS_OF_CEVAL

TASKS = Path(lm_eval.tasks.__file__).parent
NAMED = ("mmlu", "ceval-valid", "boolq", "gsm8k", "agieval_en", "bbh", "humaneval", "arc_challenge")
OWN = tuple(f"modellink_{name}" for name in ("mmlu", "ceval", "boolq", "gsm8k", "agieval", "bbh", "humaneval"))


def write_every_dataset(directory):
    """What ``NAMED`` and ``OWN`` read: three questions of each subject."""
    write_mmlu(directory / "cais/mmlu")
    write_ceval(directory / "ceval/ceval-exam")
    write_bbh(directory / "SaylorTwift/bbh")
    for subject in AGIEVAL_SUBJECTS:
        write_agieval(directory / "hails" / f"agieval-{subject}", subject)
    numbers = range(6)
    boolq = [{"question": f"is {n} even", "passage": f"{n}.", "idx": n, "label": 1 - n % 2} for n in numbers]
    write_dataset(directory / "aps/super_glue", ("boolq", {"train": boolq, "validation": boolq, "test": boolq}))
    gsm8k = [{"question": f"What is {n} + 1?", "answer": f"{n} + 1 = {n + 1}\n#### {n + 1}"} for n in numbers]
    write_dataset(directory / "openai/gsm8k", ("main", {"train": gsm8k, "test": gsm8k}))
    labels = ["A", "B", "C", "D"]
    arc = [
        {"id": f"q{n}", "question": f"{n}?", "choices": {"text": list("wxyz"), "label": labels}, "answerKey": "B"}
        for n in numbers
    ]
    write_dataset(directory / "allenai/ai2_arc", ("ARC-Challenge", {"train": arc, "validation": arc, "test": arc}))
    write_dataset(directory / "openai/openai_humaneval", ("openai_humaneval", {"test": [ADDITION]}))
    return directory


def write_mmlu(place):
    """The 57 subjects, and all of them together."""
    configs = []
    whole = {"dev": [], "test": [], "validation": []}
    for subject in names_in(TASKS / "mmlu" / "default"):
        rows = [
            {"question": f"{n}?", "subject": subject, "choices": ["w", "x", "y", "z"], "answer": n % 4}
            for n in range(3)
        ]
        configs.append((subject, dict.fromkeys(whole, rows)))
        for split in whole.values():
            split += rows
    write_dataset(place, ("all", whole), *configs)


def write_ceval(place):
    """The 52 subjects."""
    rows = [
        {
            "id": n,
            "question": f"{n}？",
            "A": "甲",
            "B": "乙",
            "C": "丙",
            "D": "丁",
            "answer": "ABCD"[n],
            "explanation": "",
        }
        for n in range(3)
    ]
    subjects = SUBJECTS_OF_CEVAL.read_text().split()
    write_dataset(place, *[(subject, {"dev": rows, "val": rows, "test": rows}) for subject in subjects])


def write_bbh(place):
    """The 27 tasks."""
    rows = [{"input": f"not {n}", "target": str(not n)} for n in range(3)]
    write_dataset(place, *[(name, {"test": rows}) for name in names_in(TASKS / "bbh" / "fewshot")])


def write_agieval(place, subject):
    """A subject: questions with choices, or with an answer to be written."""
    if subject in AGIEVAL_CLOZE:
        rows = [{"query": f"Q: {n}? A: The answer is", "answer": f"${n}$"} for n in range(5)]
    else:
        choices = ["(A)w", "(B)x", "(C)y", "(D)z"]
        rows = [
            {"query": f"Q: {subject} {n}? Answer Choices: {' '.join(choices)}\nA: Among A through D, the answer is",
             "choices": choices, "gold": [n % 4]}
            for n in range(5)
        ]  # fmt: skip
    write_dataset(place, ("default", {"test": rows}))


def names_in(folder):
    """The data sets that the task files of a folder of the harness name."""
    found = [yaml.load(path.read_text(), yaml.BaseLoader).get("dataset_name") for path in folder.glob("*.yaml")]
    return sorted(name for name in found if name)
