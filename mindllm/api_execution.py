"""The public functions that execute a run: train, generate, evaluate. As :mod:`mindllm.api`, which looks at runs.

Each works in a process of its own, because MindSpore takes one device and one context per process.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindllm.api import Run, load_config
from mindllm.arguments import Index, Prompt, checked
from mindllm.terminal.progress import Progress, unwatched

if TYPE_CHECKING:
    from mindllm.evaluate.outcome import Scores
    from mindllm.generate.outcome import Generation
    from mindllm.run.outcome import HeldOutLoss, Training


@checked
def train(run: Run, *, progress: Progress = unwatched) -> Training:
    """Train, or fine-tune where ``run_mode`` says so, and return the losses and the last checkpoint.

    It happens in a process of its own, because MindSpore takes one device and one context per process: so a program may train
    again and again. Ctrl-C stops it after a step, with a checkpoint. Several devices of a CPU run are executed together;
    several Ascend devices need the launcher, as the error says.

    Args:
        run: the run. Results of another run in its ``output_dir`` are kept: ``load_config(run, {"resume_training": True})`` goes
            on with them, ``{"overwrite": True}`` begins anew.
        progress: told of the last step that is done.

    Raises:
        UserError: the configuration cannot be trained, or the output directory holds another run.
        RunFailed: training failed.
    """
    from mindllm.run.outcome import train_in_child

    config = load_config(run)
    if config.run_mode not in ("train", "finetune"):
        config = load_config(config, {"run_mode": "train"})
    return train_in_child(config, progress)


@checked
def generate(
    run: Run,
    prompts: str | Sequence[Prompt],
    *,
    load_checkpoint: str | Path | None = None,
    seed: Index | None = None,
    **options: Any,
) -> Generation:
    """Continue prompts with a trained model, in a process of its own.

    Args:
        run: a run, or a Hugging Face directory, which is executed on the CPU.
        prompts: a text; or several, each a text or a conversation (a list of messages with ``role`` and ``content``).
        load_checkpoint: the weights; None: the run's.
        seed: of sampling; None: the run's.
        options: keys of the section ``generation``, as ``max_new_tokens=32`` or ``do_sample=True``.

    Raises:
        UserError: no weights, no tokenizer, an unknown option, or a prompt that cannot be continued.
    """
    from mindllm.generate.outcome import generate_in_child

    changes: dict[str, Any] = {"run_mode": "predict", "input_data": "", **_weights(load_checkpoint)}
    changes |= {} if seed is None else {"seed": seed}
    changes |= {f"generation.{name}": value for name, value in options.items()}
    config = load_config(_on_cpu(run), changes)
    return generate_in_child(config, [prompts] if isinstance(prompts, str) else prompts)


@checked
def evaluate(
    run: Run,
    *,
    tasks: str | Sequence[str] = (),
    load_checkpoint: str | Path | None = None,
    output: Path | str = "output_evaluate",
    **options: Any,
) -> HeldOutLoss | Scores:
    """Evaluate a checkpoint on held-out text, or on public tasks, in a process of its own.

    Args:
        run: a run; or, with ``tasks``, a Hugging Face directory or a checkpoint.
        tasks: a task of lm-evaluation-harness or a group of them, or several; none: the loss on the run's held-out text.
        load_checkpoint: the weights of a run; None: those it names.
        output: where results of a directory go; those of a run go below its ``output_dir``.
        options: of tasks, as ``limit=100`` or ``num_fewshot=5``: keys of the section ``evaluation``.

    Raises:
        UserError: no weights, an unknown task or option.
        RunFailed: a task failed.
    """
    tasks = [tasks] if isinstance(tasks, str) and tasks else tasks
    if isinstance(run, str | os.PathLike) and tasks and Path(run).is_dir():
        from mindllm.evaluate.outcome import evaluate_model

        return evaluate_model(Path(run), tasks, Path(output), options)
    changes = {f"evaluation.{name}": value for name, value in options.items()}
    config = load_config(run, {"run_mode": "eval", **_weights(load_checkpoint), **changes})
    if tasks:
        from mindllm.evaluate.outcome import evaluate_run

        return evaluate_run(config, tasks)
    from mindllm.run.outcome import evaluate_in_child

    return evaluate_in_child(config)


def _weights(path: str | Path | None) -> dict[str, str]:
    return {} if path is None else {"load_checkpoint": str(path)}


def _on_cpu(run: Run) -> Run:
    """A Hugging Face directory as a run on one CPU; any other run as it is."""
    from mindllm.config import is_hugging_face

    if not isinstance(run, str | os.PathLike) or not is_hugging_face(Path(run)):
        return run
    return {"load_checkpoint": os.fspath(run), "use_parallel": False, "context": {"device_target": "CPU"}}
