"""What is different in a simulated run: its files are its own, and it ends after one step unless the YAML says when."""

from __future__ import annotations

from mindllm.config import RunConfig, override_config


def with_own_files(config: RunConfig, rank: int) -> RunConfig:
    """Writes below ``{output_dir}/simulated/rank_{rank}``, so that nothing of a real run is touched."""
    return override_config(config, {"output_dir": f"{config.output_dir}/simulated/rank_{rank}"})


def one_step_unless_said(config: RunConfig, step: int) -> RunConfig:
    """Ends one step after ``step`` where ``runner_config.stop_step`` is not given."""
    return config if config.runner_config.stop_step else override_config(config, {"runner_config.stop_step": step + 1})
