"""Tasks, one after the other: what the harness makes of each, and why one failed while the others' scores are kept."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager

from mindllm.config.evaluation import EvaluationConfig
from mindllm.errors import RunFailed, UserError, nearest, shortened
from mindllm.evaluate.local_data import local_data
from mindllm.evaluate.model import EvaluatedModel

OWN_TASKS = Path(__file__).with_name("tasks")
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
    """Returns the harness's list of tasks; raises UserError for a name that is none of them."""
    paths = [OWN_TASKS]
    if options.include_path:
        if not Path(options.include_path).is_dir():
            raise UserError(f"include_path {options.include_path}: no such directory of tasks")
        paths.append(Path(options.include_path))
    with _quiet():
        manager = TaskManager(include_path=[str(path) for path in paths])
    for name in names:
        if name not in manager.task_index:
            raise UserError(f"{shortened(name)}: no such task{_closest(name, manager.all_tasks)}")
    return manager


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
    loaded = manager.load([name])["tasks"]
    unsafe = [task for task, item in loaded.items() if getattr(item, "UNSAFE_CODE", False)]
    if unsafe and not options.confirm_run_unsafe_code:
        raise UserError(
            f"{unsafe[0]} runs code that the model writes; give --confirm_run_unsafe_code to run it in a process of its own, "
            "with bounds"
        )
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
    """The harness's own bars count texts before they are answered; the one that counts answers is ours."""
    import lm_eval.api.model
    import lm_eval.api.task

    modules = (lm_eval.api.model, lm_eval.api.task)
    before = [module.tqdm for module in modules]
    for module in modules:
        module.tqdm = lambda items=None, *_, **__: items
    try:
        yield
    finally:
        for module, bar in zip(modules, before, strict=True):
            module.tqdm = bar
