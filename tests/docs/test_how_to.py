"""How-to pages are followed as they stand, and print what they show: what takes seconds always, the rest in the slow suite.

What cannot run here says why, and is read by the parser of its command.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache

import how_to_files as files
import pytest
import yaml
from markdown_pages import ROOT
from page_commands import Ran, Step, follow, in_a_shell, missing, steps

from mindllm.cli.registry import VERBS

OWN_TEST = {"python": "tests/api/test_python_page.py"}
NETWORK, NODES, DEVICES = "needs a network", "needs several nodes", "needs Ascend devices"
TINY_CPU = "trains for minutes: tests/end_to_end/test_experts_on_a_laptop.py"
MINDFORMERS = "needs MindFormers 1.8, whose environment takes 3 GB (scripts/mindformers.sh)"


@dataclass(frozen=True)
class Page:
    """How a page is followed; commands are named by a part of them.

    Attributes:
        files: writes what the commands find in their directory.
        slow_files: the same for those of ``slow`` alone.
        serves: a directory that a hub on this machine has.
        slow: commands that take seconds, or have MindSpore compile.
        not_here: why a command does not run here.
        codes: exit codes that are not 0.
        estimated: commands whose figures depend on the machine, or on how far a search comes in its seconds.
        others: commands that run on another program than the page's: of what they print, headings of tables are held.
        told: outputs that no command of the page prints, by a part of their first line, and where they are from.
    """

    files: Callable[[], None] = lambda: None
    slow_files: Callable[[], None] = lambda: None
    serves: str = ""
    slow: tuple[str, ...] = ()
    not_here: dict[str, str] = field(default_factory=dict)
    codes: dict[str, int] = field(default_factory=dict)
    estimated: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    told: dict[str, str] = field(default_factory=dict)

    def names(self) -> Iterator[str]:
        """Yield every part of a command that an entry names."""
        yield from (*self.slow, *self.not_here, *self.codes, *self.estimated, *self.others)

    def code(self, command: str) -> int:
        return next((code for part, code in self.codes.items() if part in command), 0)


HOW_TO = {
    "proving": Page(
        files.proving,
        slow=("prove run.yaml", "_13b_16p", "runs/a.yaml", "--against"),
        not_here={"pip install": NETWORK, "RAY_ADDRESS": f"{NODES}: tests/executor has a Ray of three on this one"},
        codes={"--quick": 1},
        told={"proved 2026": "said where a run starts: tests/prove/test_found.py"},
    ),
    "cluster_check": Page(
        files.cluster_check,
        slow=("mindllm check",),
        not_here={"--table proven.md": "takes hours"},
        told={
            "1.448292 on a single device": "planted, as in tests/verify/test_cluster_check_faults.py",
            "no rank can go on": "planted, as in tests/compiled/test_execute_lockstep.py",
        },
    ),
    "dry_run": Page(),
    "compiled_graph": Page(told={"refuses the sharding": "planted, as in tests/compiled/test_compiler_refusals.py"}),
    "mindformers_yaml": Page(files.mindformers_yaml, slow=("pretrain_llama2_7b",), codes={"--model.": 2}),
    "any_program": Page(
        files.any_program,
        slow=("mindllm offline", "mindllm check --program cluster", "mindllm plan"),
        not_here={".venv-mindformers": MINDFORMERS, "eval": MINDFORMERS, "train.py": MINDFORMERS},
        codes={"loss_over_devices": 3},
        others=("inspect comm", "mindllm plan", "mindllm time"),
    ),
    "planning_a_run": Page(files.planning, slow=("mindllm plan",)),
    "pipeline_balance": Page(files.pipeline_balance, slow=("run.yaml --formula", "--simulated")),
    "step_time": Page(files.step_time, slow=("mindllm search", "replay.py")),
    "profiles": Page(files.profiles, not_here={"mindllm train": DEVICES}),
    "recipes": Page(
        files.recipes,
        slow=("finetune", "chat"),
        not_here={"mindllm pretrain": "trains a model of 0.5 billion parameters"},
    ),
    "data": Page(),
    "fine_tuning": Page(files.fine_tuning, slow=("run_llm.py", "weights adapter", "weights merge")),
    "optimizers": Page(),
    "experts": Page(
        not_here={
            "quickstart.sh": "installs into .venv",
            "pretrain_mixtral_tiny": TINY_CPU,
            "loss-curve": TINY_CPU,
        },
        slow=("dry-run", "mindllm check"),
        told={
            "largest load": "of a run of 400 steps; its form: tests/train/test_expert_loads.py",
            "mtp_loss": "of a run of 400 steps; the loss: tests/models/test_prediction.py",
        },
    ),
    "long_context": Page(
        slow=("dry-run", "check", "inspect"),
        told={"rank 0: 0 1 2 3": "the order itself: tests/models/test_balanced_attention.py"},
    ),
    "several_processes": Page(slow_files=files.corpus, slow=("msrun_launcher",)),
    "clusters": Page(
        slow_files=files.clusters,
        slow=("pretrain_llama2_tiny", "MS_SIM", "dry_run.sh", "mindllm check", "preflight.sh", "configure"),
        not_here={
            "preflight.sh configs/llama2/pretrain_llama2_13b.yaml 16": NODES,
            '--restart 3 "run_llm.py': DEVICES,
            "srun": NODES,
            "sbatch job.sh": NODES,
            "kubectl": NODES,
        },
        codes={"preflight.sh": 3},
        estimated=("preflight.sh",),
    ),
    "accept": Page(not_here={"source": DEVICES, "--devices 8": DEVICES}, slow=("--claims",)),
    "dashboard": Page(
        not_here={"mindinsight.sh": f"{NETWORK}, and ends with Ctrl-C: tests/end_to_end/test_mindinsight.py"}
    ),
    "weights": Page(
        files.weights,
        serves="models/llama",
        slow=("run_llm.py", "mindllm generate", "mindllm finetune", "weights merge"),
        not_here={"pip install": NETWORK},
    ),
    "quantization": Page(files.quantization, slow=("lora.yaml", "weights")),
    "generation": Page(files.generation, slow=("run_llm.py",)),
    "evaluation": Page(files.evaluation, slow=("mindllm evaluate",)),
    "editor": Page(),
}


PARTS = [(page, part) for page, table in HOW_TO.items() for part in table.names()]
NOT_HERE = [(page, part) for page, table in HOW_TO.items() for part in table.not_here]
HEADINGS = re.compile(r"^[^\d:]*\w  +\w[^\d:]*$")  # the first line of a table
OPTIONS_OF = {"mindllm": None, "run_llm.py": "train", "toolkit.offline": "offline"}


def steps_of(page: str) -> list[Step]:
    return list(steps(ROOT / "docs" / f"{page}.md"))


def commands_of(page: str) -> list[str]:
    return [command for step in steps_of(page) for command in step.commands]


def has(command: str, parts: Iterable[str]) -> bool:
    return any(part in command for part in parts)


def here_of(page: str, only_quick: bool) -> Iterator[Step]:
    """Yield the steps of a page with the commands that are run here."""
    table = HOW_TO[page]
    left_out = (*table.not_here, *(table.slow if only_quick else ()))
    for step in steps_of(page):
        if commands := [command for command in step.commands if not has(command, left_out)]:
            yield Step(commands, step.shown)


def follow_page(page: str, run: Callable[[str], Ran], only_quick: bool) -> None:
    """Run the commands of a page, and hold exit codes and what they print against it."""
    table = HOW_TO[page]
    for step in here_of(page, only_quick):
        figures = not any(has(command, table.estimated) for command in step.commands)
        if any(has(command, table.others) for command in step.commands):
            step = Step(step.commands, [line for line in step.shown if HEADINGS.search(line)])
        codes = follow(step, run, figures)
        assert dict(zip(step.commands, codes, strict=True)) == {name: table.code(name) for name in step.commands}


def words_of_mindllm(command: str) -> list[str]:
    """Return a verb and its options, of whatever a command calls mindllm by; empty where it calls something else."""
    words = shlex.split(command, comments=True)
    words = [
        more for word in words for more in (shlex.split(word) if word.startswith(("run_llm.py ", "$(")) else [word])
    ]
    for name, verb in OPTIONS_OF.items():
        if name in words:
            rest = words[words.index(name) + 1 :]
            return [verb, *rest] if verb else rest
    return []


def nav_of(name: str, node: object) -> Iterator[str]:
    """Yield the pages below an entry of nav."""
    if isinstance(node, str):
        yield node.removesuffix(".md")
    elif isinstance(node, list):
        for item in node:
            yield from nav_of(name, item)
    elif isinstance(node, dict):
        for item in node.values():
            yield from nav_of(name, item)


def test_every_page_of_the_section_is_followed():
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    nav = yaml.safe_load(text[text.index("\nnav:") :])["nav"]
    (section,) = [item["How-to"] for item in nav if "How-to" in item]
    assert set(nav_of("How-to", section)) == {*HOW_TO, *OWN_TEST}


@pytest.mark.parametrize(("page", "part"), PARTS)
def test_the_table_names_commands_of_the_page(page, part):
    assert has_part(commands_of(page), part)


def has_part(commands: list[str], part: str) -> bool:
    return any(part in command for command in commands)


@pytest.mark.parametrize("page", HOW_TO)
def test_what_no_command_prints_is_said_to_be_so(page):
    """Each such output names the test that holds it, or why none does."""
    alone = [step.shown[0] for step in steps_of(page) if step.shown and not step.commands]
    told = HOW_TO[page].told
    assert [line for line in alone if not has(line, told)] == []
    assert [part for part in told if not has_part(alone, part)] == []
    named = [word for why in told.values() for word in why.split() if word.startswith("tests/")]
    assert [name for name in named if not (ROOT / name).is_file()] == []


@pytest.mark.parametrize(("page", "part"), NOT_HERE)
def test_what_cannot_run_here_is_read_by_the_parser_of_its_command(page, part, place):
    for command in commands_of(page):
        if part in command and (words := words_of_mindllm(command)):
            verb, *options = words
            _, rest = VERBS[verb].parser().parse_known_args(options)
            assert VERBS[verb].takes_keys or not rest, command
            for word in (*options, *command.replace('"', " ").split()):
                assert not word.startswith(("configs/", "scripts/")) or (place / word).exists(), command


@pytest.fixture
def files_of(place, request):
    """Writes what the commands of a page find in their directory."""

    def write(page: str, slow: bool) -> None:
        table = HOW_TO[page]
        table.files()
        if slow:
            table.slow_files()
        if table.serves:
            request.getfixturevalue("hub")(table.serves)

    return write


@pytest.mark.parametrize("page", [page for page in HOW_TO if list(here_of(page, only_quick=True))])
def test_the_quick_commands_print_what_the_page_shows(page, here, files_of):
    files_of(page, slow=False)
    follow_page(page, here, only_quick=True)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    "page", [page for page in HOW_TO if any(has(name, HOW_TO[page].slow) for name in commands_of(page))]
)
def test_all_commands_print_what_the_page_shows(page, files_of):
    """What stands twice on a page is run once."""
    files_of(page, slow=True)
    follow_page(page, cache(in_a_shell), only_quick=False)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_python_of_a_compiled_graph_gives_what_the_page_says(place):
    """A comment is what the expression before it gives, beside it or on the line above."""
    names: dict[str, object] = {}
    exec(files.block_of("compiled_graph", "python", 0), names)
    lines = files.block_of("compiled_graph", "python", 1).replace("\n# ", "  # ").splitlines()
    told = [line.partition("  # ") for line in lines]
    for code, _, value in told:
        if not value:
            exec(code, names)
        else:
            assert missing([value], repr(eval(code, names))) == [], code
    assert sum(bool(value) for _, _, value in told) == 4
