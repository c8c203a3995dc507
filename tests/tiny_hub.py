"""Tiny data sets in the formats of the real ones, in the layout of the hub."""

import pyarrow as pa
import pyarrow.parquet as pq

FACTS = [("2+2", "4", "5"), ("sky", "blue", "red"), ("ice", "cold", "hot"), ("1+5", "6", "7"), ("sun", "hot", "icy")]


ADDITION = {  # a problem of HumanEval
    "task_id": "HumanEval/0",
    "prompt": 'def add(a, b):\n    """Adds."""\n',
    "canonical_solution": "    return a + b\n",
    "test": "def check(candidate):\n    assert candidate(2, 3) == 5\n",
    "entry_point": "add",
}


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
    write_dataset(directory / "allenai/ai2_arc", ("ARC-Easy", {"train": arc, "validation": arc, "test": arc}))
    mmlu = [
        {"question": f"{asked}?", "subject": "abstract_algebra", "choices": [wrong, right, "x", "y"], "answer": 1}
        for asked, right, wrong in FACTS
    ]
    write_dataset(directory / "cais/mmlu", ("abstract_algebra", {"dev": mmlu, "test": mmlu, "validation": mmlu}))
    boolq = [
        {"question": f"is {asked} {right}", "passage": f"The {asked} is {right}.", "idx": number, "label": number % 2}
        for number, (asked, right, _) in enumerate(FACTS)
    ]
    write_dataset(directory / "aps/super_glue", ("boolq", {"train": boolq, "validation": boolq, "test": boolq}))
    gsm8k = [
        {"question": f"Ann has {n} and gets {n + 1}. How many?", "answer": f"{n}+{n + 1}={2 * n + 1}\n#### {2 * n + 1}"}
        for n in range(5)
    ]
    write_dataset(directory / "openai/gsm8k", ("main", {"train": gsm8k, "test": gsm8k}))
    pages = [{"page": "The quick brown fox jumps. " * 14}, {"page": " = Sun = \n It is hot .\n"}]
    write_dataset(
        directory / "EleutherAI/wikitext_document_level",
        ("wikitext-2-raw-v1", {"train": pages, "validation": pages, "test": pages}),
    )
    write_dataset(directory / "openai/openai_humaneval", ("openai_humaneval", {"test": [ADDITION]}))
    return directory


def write_dataset(place, *configs):
    """A repository of the hub: parquet files, and a README whose head says which are whose; ``configs``: (name, splits)."""
    lines = []
    for name, splits in configs:
        (place / name).mkdir(parents=True)
        lines += [f"- config_name: {name}", "  data_files:"]
        for split, rows in splits.items():
            pq.write_table(pa.Table.from_pylist(rows), place / name / f"{split}-00000-of-00001.parquet")
            lines += [f"  - split: {split}", f"    path: {name}/{split}-*"]
    (place / "README.md").write_text("\n".join(["---", "configs:", *lines, "---", ""]))
