"""How many YAMLs of MindFormers convert: by network and, of those that do not, by reason.

Its wheels carry theirs: ``pip download mindformers==2.0.0 --no-deps``, unzip, and name the directory.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from mindllm.command import CommandParser, run_command
from mindllm.config.reading.document import Document, child
from mindllm.config.reading.load import build_config, read_file
from mindllm.errors import UserError
from mindllm.mindformers.reader import convert, is_mindformers
from mindllm.terminal.console import output, print_json
from mindllm.terminal.tables import Table, figures, texts

TRAINING = ("train", "finetune", "eval")
NAMES = (("model", "arch", "type"), ("model", "model_config", "architectures"), ("model", "architectures"))


@dataclass(frozen=True)
class Result:
    """One file: the class of its network, and why it does not convert (empty: it does, and passes all checks)."""

    file: str
    network: str
    reason: str
    digest: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Converts every training YAML below some directories and prints the counts."""
    parser = CommandParser(prog="python -m toolkit.benchmark.mindformers_yamls", description=__doc__)
    parser.add_argument("directories", nargs="+", type=Path, metavar="DIRECTORY")
    parser.add_argument("--json", action="store_true", help="print one JSON object, with every file")
    parser.add_argument("--predict", action="store_true", help="YAMLs of prediction, too")
    options = parser.parse_args(arguments)
    results = list(convert_all(options.directories, options.predict))
    if not results:
        raise UserError(f"no YAML of MindFormers below {', '.join(map(str, options.directories))}")
    if options.json:
        print_json({"files": [asdict(result) for result in results]})
    else:
        print_counts(results)
    return 0


def convert_all(directories: Iterable[Path], predict: bool = False) -> Iterator[Result]:
    """Yields the result of every YAML of MindFormers that trains (or also predicts)."""
    for directory in directories:
        for path in sorted(directory.rglob("*.yaml")):
            try:
                document = read_file(path)
            except UserError as error:
                yield Result(str(path), "no YAML", _without_place(str(error)), "")
                continue
            mode = document.data.get("run_mode", "train")
            if is_mindformers(document) and (predict or mode in TRAINING):
                digest = hashlib.sha256(path.read_bytes()).hexdigest()
                yield Result(str(path), _network(document), _reason(document, path), digest)


def _network(document: Document) -> str:
    for place in NAMES:
        value: object = document.data
        for key in place:
            value = child(value, key)
        if value:
            return str(value[0] if isinstance(value, list) else value)
    return "of a Hugging Face directory" if document.data.get("pretrained_model_dir") else "none"


def _reason(document: Document, path: Path) -> str:
    try:
        build_config(convert(document), path)
    except UserError as error:
        return _without_place(str(error))
    return ""


def _without_place(message: str) -> str:
    """The first line of an error without file, line and value: what files have in common."""
    line = message.splitlines()[0]
    line = line.partition(": ")[2] if ".yaml" in line.partition(": ")[0] else line
    return line.partition(" (value")[0]


def print_counts(results: Sequence[Result]) -> None:
    """Prints the two tables."""
    table = Table("", [*texts("network"), *figures("files", "distinct", "convert")])
    networks = Counter(result.network for result in results)
    for network, count in networks.most_common():
        own = [result for result in results if result.network == network]
        table.add_row(network, str(count), str(_distinct(own)), str(sum(not result.reason for result in own)))
    converted = [result for result in results if not result.reason]
    table.add_row("all", str(len(results)), str(_distinct(results)), str(len(converted)))
    output.print(table)
    reasons = Counter(result.reason for result in results if result.reason)
    if reasons:
        told = Table("", [*figures("files"), *texts("the first reason why not")])
        for reason, count in reasons.most_common():
            told.add_row(str(count), reason)
        output.print()
        output.print(told)


def _distinct(results: Iterable[Result]) -> int:
    return len({result.digest for result in results})


if __name__ == "__main__":
    run_command(main)
