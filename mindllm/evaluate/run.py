"""Tasks, one after the other: what the harness makes of each, and why one failed while the others' scores are kept."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lm_eval.tasks
from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager

from mindllm.config.generation import EvaluationConfig
from mindllm.errors import RunFailed, UserError, nearest, shortened
from mindllm.evaluate.code import demand_bounds
from mindllm.evaluate.local_data import local_data
from mindllm.evaluate.model import EvaluatedModel
from mindllm.evaluate.task_code import refuse_python, sandboxed

OWN_TASKS = Path(__file__).with_name("tasks")
PUBLIC_TASKS = Path(lm_eval.tasks.__file__).parent
MERGED = ("results", "groups", "group_subtasks", "configs", "versions", "n-shot", "higher_is_better", "n-samples")
Results = dict[str, dict[str, Any]]


@dataclass
class Outcome:
    """Results of the tasks that succeeded, as the harness gives them; why others failed; every question with its answer."""

    results: Results = field(default_factory=lambda: {name: {} for name in MERGED})
    failures: dict[str, str] = field(default_factory=dict)
    samples: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def scores(self) -> dict[str, dict[str, float]]:
        """Finite figures by task or group of tasks, and by metric with its filter: ``acc``, ``exact_match,strict-match``."""
        found = {}
        for task, metrics in self.results["results"].items():
            numbers = {name.removesuffix(",none"): value for name, value in metrics.items() if is_score(name, value)}
            found[task] = {name: float(value) for name, value in numbers.items()}
        return found


def is_score(name: str, value: Any) -> bool:
    """Whether an entry of a task's results is a figure of merit, not its spread or how many samples there were."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return is_number and "," in name and "_stderr" not in name


def find_tasks(names: Sequence[str], options: EvaluationConfig) -> TaskManager:
    """Returns the harness's list of tasks, as much of it as ``names`` need.

    Raises:
        UserError: one is no task, or runs Python of ``include_path`` that was not confirmed.
    """
    if options.include_path and not Path(options.include_path).is_dir():
        raise UserError(f"include_path {options.include_path}: no such directory of tasks")
    manager = _list_of(options, _folders(names))
    if not all(name in manager.task_index for name in names):
        manager = all_tasks(options)
    for name in names:
        if name not in manager.task_index:
            raise UserError(f"{shortened(name)}: no such task{_closest(name, manager.all_tasks)}")
    if options.include_path and not options.confirm_run_unsafe_code:
        refuse_python(names, manager.task_index, [PUBLIC_TASKS.resolve(), OWN_TASKS.resolve()])
    return manager


def all_tasks(options: EvaluationConfig) -> TaskManager:
    """All tasks there are: some fourteen thousand files, which takes some twenty seconds."""
    return _list_of(options, [PUBLIC_TASKS])


def _list_of(options: EvaluationConfig, folders: Sequence[Path]) -> TaskManager:
    paths = [*folders, OWN_TASKS, *([Path(options.include_path)] if options.include_path else [])]
    with _quiet():
        return TaskManager(include_path=[str(path) for path in paths], include_defaults=False)


def _folders(names: Sequence[str]) -> list[Path]:
    """The folders of the harness where one of ``names`` is defined, as a task, a group, or what several are tagged with."""
    word = "|".join(re.escape(name) for name in names)
    defined = re.compile(rf"^\s*(?:(?:task|group|tag):|-)\s*[\"']?(?:{word})[\"']?\s*$", re.MULTILINE)
    found = {}
    for path in sorted(PUBLIC_TASKS.rglob("*.yaml")):
        folder = path.relative_to(PUBLIC_TASKS).parts[0]
        if folder not in found and defined.search(path.read_text(encoding="utf-8", errors="replace")):
            found[folder] = PUBLIC_TASKS / folder
    return list(found.values())


def evaluate_tasks(
    model: EvaluatedModel, names: Sequence[str], options: EvaluationConfig, manager: TaskManager | None = None
) -> Outcome:
    """Evaluates ``model`` on each of ``names``, tasks or groups of them.

    What fails is in the outcome's ``failures``, with the reason.
    """
    outcome, manager = Outcome(), manager or find_tasks(names, options)
    for name in dict.fromkeys(names):
        try:
            with _quiet(), local_data(Path(options.data)):
                found = _evaluate(model, name, options, manager)
        except (UserError, RunFailed) as error:
            outcome.failures[name] = str(error)
        except MemoryError:
            raise
        except Exception as error:  # a task is a program of others, run on data of others
            logging.getLogger(__name__).debug("task %s", name, exc_info=error)
            outcome.failures[name] = f"{type(error).__name__}: {shortened(str(error), 300)}"
        else:
            for part in MERGED:
                outcome.results[part].update(found.get(part) or {})
            outcome.samples.update(found.get("samples") or {})
    return outcome


def _evaluate(model: EvaluatedModel, name: str, options: EvaluationConfig, manager: TaskManager) -> dict[str, Any]:
    try:
        loaded = manager.load([name])["tasks"]
    except KeyError:  # a group of tasks that other folders define
        manager = all_tasks(options)
        loaded = manager.load([name])["tasks"]
    unsafe = [task for task, item in loaded.items() if getattr(item, "UNSAFE_CODE", False)]
    if unsafe and not options.confirm_run_unsafe_code:
        raise UserError(
            f"{unsafe[0]} runs code that the model writes; give --confirm_run_unsafe_code to run it in a process of its own, "
            "with bounds"
        )
    if unsafe:
        demand_bounds()  # before the model writes anything
    return simple_evaluate(
        model=model,
        tasks=list(loaded.values()) if len(loaded) == 1 and name in loaded else [name],
        num_fewshot=options.num_fewshot,
        limit=options.limit,
        apply_chat_template=options.apply_chat_template,
        gen_kwargs=dict(options.gen_kwargs) or None,
        task_manager=manager,
        log_samples=True,
        confirm_run_unsafe_code=options.confirm_run_unsafe_code,
    )


def _closest(name: str, known: Sequence[str]) -> str:
    found = nearest(name, known)
    return found if found.startswith("; did") else "; python -m lm_eval ls tasks lists them"


@contextmanager
def _quiet() -> Iterator[None]:
    """The harness and what it is made of say what is wrong, and nothing else: bars and advice are ours to give."""
    import datasets

    names = ("lm_eval", "datasets", "evaluate", "huggingface_hub")
    before = {name: logging.getLogger(name).level for name in names}
    shown = datasets.utils.logging.is_progress_bar_enabled()
    for name in names:
        logging.getLogger(name).setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    try:
        with _without_bars():
            yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)
        if shown:
            datasets.enable_progress_bars()


@contextmanager
def _without_bars() -> Iterator[None]:
    """Without the harness's own bars, which count texts before they are answered, its look at the machine and at git, and with
    templates that reach nothing but what they are given.
    """
    import lm_eval.api.model
    import lm_eval.api.task
    import lm_eval.evaluator
    import lm_eval.utils

    def as_it_is(items: Any = None, *_: Any, **__: Any) -> Any:
        return items

    replaced: list[tuple[Any, str, Any]] = [
        (lm_eval.api.model, "tqdm", as_it_is),
        (lm_eval.api.task, "tqdm", as_it_is),
        (lm_eval.evaluator, "get_git_commit_hash", lambda: None),
        (lm_eval.evaluator, "add_env_info", lambda results: None),
        (lm_eval.utils, "env", sandboxed(lm_eval.utils.env)),
    ]
    before = [getattr(module, name) for module, name, _ in replaced]
    for module, name, ours in replaced:
        setattr(module, name, ours)
    try:
        yield
    finally:
        for (module, name, _), original in zip(replaced, before, strict=True):
            setattr(module, name, original)
