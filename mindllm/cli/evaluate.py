"""What ``mindllm evaluate`` does."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from mindllm.cli.parsers.evaluate import make_parser
from mindllm.command import run_command
from mindllm.config.generation import EvaluationConfig
from mindllm.process.interrupts import interruptible
from mindllm.terminal.console import error_console, output, print_json
from mindllm.terminal.render import REMAINING, drawn


def main(arguments: Sequence[str] | None = None) -> int:
    """Evaluates, prints the table; returns the exit code."""
    options = make_parser().parse_args(arguments)
    import lm_eval  # noqa: F401  (what is not installed is told before anything is done)

    from mindllm.evaluate.evaluation import evaluate_on_tasks, failure_of
    from mindllm.evaluate.load import run_of
    from mindllm.evaluate.outcome import Scores
    from mindllm.evaluate.report import PAGE, as_json, table
    from mindllm.train.device import prepare_environment, set_up_device

    with drawn(*REMAINING) as progress:
        config = run_of(options.model, _evaluation(options), options.tokenizer, progress)
        if options.max_length:
            config = _with_length(config, options.max_length)
        prepare_environment(config)
        set_up_device(config)
        with interruptible():
            outcome = evaluate_on_tasks(config, options.tasks, options.output, progress=progress)
    if options.json:
        print_json(Scores(as_json(outcome, str(options.model))).to_dict())
    elif outcome.results["results"]:
        output.print(table(outcome))
    error_console.print(f"results, and the wrong answers in {PAGE}: {options.output}")
    if outcome.failures:
        raise failure_of(outcome.failures)
    return 0


def _evaluation(options: argparse.Namespace) -> EvaluationConfig:
    return EvaluationConfig(**{name: getattr(options, name) for name in EvaluationConfig.model_fields})


def _with_length(config: Any, length: int) -> Any:
    model = config.model.config.model_copy(update={"seq_length": length})
    return config.model_copy(update={"model": config.model.model_copy(update={"config": model})})


if __name__ == "__main__":
    run_command(main)
