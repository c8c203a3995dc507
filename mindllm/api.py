"""The public functions of mindllm, which commands and notebooks call: documented in docs/python.md, and stable.

Each takes a run (a ``RunConfig``, or what :func:`load_config` takes) and options with the defaults of the command of its name,
and returns a frozen result (:class:`mindllm.results.Result`): ``print`` shows the tables of the command, ``to_dict()`` gives
what ``--json`` prints. None of them prints, draws or ends the process. Where one takes ``progress``, it is called with what is
being done, how many are done, and of how many (:class:`mindllm.progress.Progress`).

Imports stand in the functions, so that ``import mindllm`` takes milliseconds; MindSpore is imported to compile or train alone.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mindllm.config import RunConfig
    from mindllm.config.overrides import Overrides
    from mindllm.timing.device import Device
    from mindllm.timing.prediction import StepPrediction

    Run = RunConfig | str | os.PathLike[str] | Mapping[str, Any]


def load_config(source: Run, overrides: Overrides = ()) -> RunConfig:
    """Read the configuration of a run, and change keys of it.

    Args:
        source: the path of a YAML, mindllm's or MindFormers'; a Hugging Face directory, whose model is trained further; a
            dictionary as a YAML has it, with a ``base`` or without; or a configuration. Paths below ``configs/`` are those
            that come with mindllm where there is no such file here.
        overrides: dotted keys and their values, as ``{"parallel_config.pipeline_stage": 8}``; or options as on a command line.

    Raises:
        UserError: something is wrong; ``problems`` has every mistake with its file, line, key, value and advice.
    """
    from mindllm import config

    if isinstance(source, config.RunConfig):
        return config.override_config(source, overrides) if overrides else source
    return config.load_config(source, overrides)


def step_time(
    run: Run, *, device: Device | str | Path | None = None, zero_shot: bool = False, explain: bool = False
) -> StepPrediction:
    """Predict how long a training step takes, and where the time goes. No MindSpore; about a second.

    Args:
        run: the run.
        device: a described device: its name, a YAML, or None for the default of ``mindllm time``.
        zero_shot: the device as it was before it was calibrated.
        explain: also predict what one change alone would bring.

    Raises:
        UserError: the run has something that is not modelled, or the device lacks a figure that it needs.
    """
    from mindllm.timing.measured.calibrate import uncalibrated
    from mindllm.timing.prediction import predict

    known = _device(device)
    return predict(load_config(run), uncalibrated(known) if zero_shot else known, explain)


def _device(device: Device | str | Path | None) -> Device:
    from mindllm.timing.device import DEFAULT, Device, read_device

    return device if isinstance(device, Device) else read_device(str(device or DEFAULT))
