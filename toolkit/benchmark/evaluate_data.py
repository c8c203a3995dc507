"""Questions about Python's standard library in the formats of public data sets: a model that has seen its source can be asked."""

from __future__ import annotations

import importlib
import inspect
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MODULE_NAMES = (
    "argparse ast asyncio calendar configparser csv dataclasses datetime difflib dis email fractions functools gzip heapq html "
    "http inspect io json locale logging mailbox mimetypes os pathlib pdb pickle platform pprint random re shutil smtplib "
    "socket sqlite3 statistics string subprocess tarfile tempfile textwrap threading tokenize traceback unittest urllib.parse "
    "urllib.request uuid warnings wave weakref xml.dom xml.sax zipfile"
)
MODULES = MODULE_NAMES.split()
LETTERS = "ABCD"
SUBJECT = "computer_security"  # of MMLU; what the questions are about does not matter to the time they take
TASKS = {
    f"mmlu_{SUBJECT}": "the same examples before all questions, a letter is the answer",
    "arc_easy": "examples drawn for each question, a name is the answer",
    "gsm8k": "examples drawn for each question, the answer is written",
}


def write_questions(directory: Path, count: int) -> None:
    """Writes ``count`` questions, and as many examples, as ``cais/mmlu``, ``allenai/ai2_arc`` and ``openai/gsm8k``."""
    draw = random.Random(0)
    known = draw.sample(_functions(), 2 * count)
    asked = [_question(name, module, draw) for name, module in known]
    parts = {"dev": asked[:count], "test": asked[count:]}
    _write(directory / "cais/mmlu", SUBJECT, {part: list(map(_mmlu, items)) for part, items in parts.items()})
    arc = {part: list(map(_arc, items)) for part, items in parts.items()}
    arc_parts = {"train": arc["dev"], "validation": arc["dev"], "test": arc["test"]}
    _write(directory / "allenai/ai2_arc", "ARC-Easy", arc_parts)
    written = {part: list(map(_gsm8k, items)) for part, items in parts.items()}
    _write(directory / "openai/gsm8k", "main", {"train": written["dev"], "test": written["test"]})


def _functions() -> list[tuple[str, str]]:
    """Public functions and classes with the module that defines them."""
    found = {}
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        for name, item in inspect.getmembers(module, lambda item: inspect.isfunction(item) or inspect.isclass(item)):
            if not name.startswith("_") and item.__module__ == module_name:
                found[name] = module_name
    return sorted(found.items())


def _question(name: str, module: str, draw: random.Random) -> dict[str, Any]:
    choices = [*draw.sample([other for other in MODULES if other != module], len(LETTERS) - 1), module]
    draw.shuffle(choices)
    return {"name": name, "choices": choices, "answer": choices.index(module)}


def _mmlu(item: Mapping[str, Any]) -> dict[str, Any]:
    text = f"Which module defines {item['name']}?"
    return {"question": text, "subject": SUBJECT, "choices": item["choices"], "answer": item["answer"]}


def _arc(item: Mapping[str, Any]) -> dict[str, Any]:
    choices = {"text": item["choices"], "label": list(LETTERS)}
    text = f"Which module defines {item['name']}?"
    return {"id": item["name"], "question": text, "choices": choices, "answerKey": LETTERS[item["answer"]]}


def _gsm8k(item: Mapping[str, Any]) -> dict[str, Any]:
    name = item["name"]
    return {
        "question": f"How many letters has {name}?",
        "answer": f"{name} has {len(name)} letters.\n#### {len(name)}",
    }


def _write(place: Path, name: str, parts: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """A repository of the hub with one JSON Lines file for each part."""
    (place / name).mkdir(parents=True)
    lines = [f"- config_name: {name}", "  data_files:"]
    for part, rows in parts.items():
        (place / name / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        lines += [f"  - split: {part}", f"    path: {name}/{part}.jsonl"]
    (place / "README.md").write_text("\n".join(["---", "configs:", *lines, "---", ""]), encoding="utf-8")
