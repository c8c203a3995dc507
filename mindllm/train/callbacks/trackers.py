"""Callbacks that pass the scalars of a run to TensorBoard, Weights & Biases or MLflow. Each needs an extra.

Nothing leaves this machine unless the configuration says so. A tracker that fails, for example on a full disk or without its
server, is logged once and does not affect training.
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from mindllm.config import render_config, tree_of
from mindllm.config.callbacks import MlflowConfig, TensorBoardConfig, WandbConfig
from mindllm.files import atomic_open
from mindllm.outside import read_json
from mindllm.train.callbacks.callback import Callback
from mindllm.train.callbacks.metrics import scalars_of
from mindllm.train.state import RunState, StepRecord

logger = logging.getLogger(__name__)
RUN_IDS = "trackers.json"  # below the output directory: the run ID of each tracker, for a resumed run
MAX_RUN_IDS_BYTES = 1 << 16

TrackerConfig = TensorBoardConfig | WandbConfig | MlflowConfig


class Tracker(Protocol):
    """A client of a tracking service."""

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Record the finite scalars of a step."""

    def close(self) -> None:
        """Flush and close."""


class TrackerMonitor(Callback):
    """Passes the scalars of every ``collect_freq``-th step, and of evaluated steps, to a tracker.

    Raises:
        ModuleNotFoundError: the library of the tracker is not installed (:mod:`mindllm.extras` names the extra).
    """

    first_rank_only = True

    def __init__(self, section: TrackerConfig) -> None:
        self.section = section
        self._open = TRACKERS[type(section)].library()
        self._tracker: Tracker | None = None

    def begin(self, state: RunState) -> None:
        """Open the tracker; a resumed run continues its run there."""
        try:
            self._tracker = self._open(self.section, state)
        except Exception as error:  # an error of a tracking library must not end training
            self._disable(error)

    def step_end(self, state: RunState, record: StepRecord) -> None:
        """Pass the scalars of a step to the tracker."""
        if self._tracker is None or (record.step % self.section.collect_freq and not state.scores):
            return
        try:
            self._tracker.log(record.step, scalars_of(state, record))
        except Exception as error:
            self._disable(error)

    def close(self) -> None:
        """Close the tracker."""
        tracker, self._tracker = self._tracker, None
        try:
            if tracker is not None:
                tracker.close()
        except Exception as error:
            self._disable(error)

    def _disable(self, error: Exception) -> None:
        self._tracker = None
        logger.error("callbacks: %s is disabled for the rest of this run: %s", self.section.type, error)


class TensorBoard:
    """TensorBoard event files, written by ``tensorboardX``."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    @staticmethod
    def library() -> Any:
        """Import the library and return a function that opens the tracker."""
        from tensorboardX import SummaryWriter

        def open_tracker(section: TensorBoardConfig, state: RunState) -> TensorBoard:
            directory = section.log_dir or str(state.output_dir / "tensorboard")
            start = state.step + 1 if state.step else None  # a resumed run replaces the steps from here on
            return TensorBoard(SummaryWriter(directory, purge_step=start, filename_suffix=f".{state.step}"))

        return open_tracker

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Append the scalars and flush them."""
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


class Wandb:
    """A run of Weights & Biases. In offline mode it is kept below the output directory for ``wandb sync``."""

    def __init__(self, run: Any) -> None:
        self._run = run

    @staticmethod
    def library() -> Any:
        """Import the library and return a function that opens the tracker."""
        import wandb

        def open_tracker(section: WandbConfig, state: RunState) -> Wandb:
            quiet = wandb.Settings(silent=True, console="off")
            run = wandb.init(
                project=section.project,
                name=section.name or state.config.trainer.model_name,
                id=run_id(state.output_dir, section.type),
                resume="allow",
                mode=section.mode,
                dir=str(state.output_dir),
                config=tree_of(state.config),
                settings=quiet,
            )
            return Wandb(run)

        return open_tracker

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Log the scalars of a step. W&B ignores steps that the run already has."""
        self._run.log(dict(scalars), step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class Mlflow:
    """A run of MLflow, in a database below the output directory or on a server."""

    def __init__(self, client: Any, run: str, metric: Any) -> None:
        self._client, self._run, self._metric = client, run, metric

    @staticmethod
    def library() -> Any:
        """Import the library and return a function that opens the tracker."""
        from mlflow import MlflowClient
        from mlflow.entities import Metric

        for library in ("mlflow", "alembic"):
            logging.getLogger(library).setLevel(logging.WARNING)

        def open_tracker(section: MlflowConfig, state: RunState) -> Mlflow:
            directory = state.output_dir.resolve()
            client = MlflowClient(section.tracking_uri or f"sqlite:///{directory / 'mlflow.db'}")
            run = read_run_id(directory, section.type)
            if run is None:
                artifacts = None if section.tracking_uri else (directory / "mlflow").as_uri()
                experiment = client.get_experiment_by_name(section.experiment)
                experiment_id = (
                    experiment.experiment_id if experiment else client.create_experiment(section.experiment, artifacts)
                )
                name = section.name or state.config.trainer.model_name
                run = client.create_run(experiment_id, run_name=name).info.run_id
                write_run_id(directory, section.type, run)
                client.log_text(run, render_config(state.config), "run.yaml")
            return Mlflow(client, run, Metric)

        return open_tracker

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Log the scalars of a step in one batch."""
        now = int(time.time() * 1000)
        self._client.log_batch(self._run, [self._metric(name, value, now, step) for name, value in scalars.items()])

    def close(self) -> None:
        """End the run."""
        self._client.set_terminated(self._run)


TRACKERS: Mapping[type, Any] = {TensorBoardConfig: TensorBoard, WandbConfig: Wandb, MlflowConfig: Mlflow}


def run_id(directory: Path, tracker: str) -> str:
    """Return the ID of the run of an output directory at a tracker. It is generated once and stored."""
    identifier = read_run_id(directory, tracker)
    if identifier is None:
        identifier = uuid.uuid4().hex[:12]
        write_run_id(directory, tracker, identifier)
    return identifier


def read_run_id(directory: Path, tracker: str) -> str | None:
    """Return the stored ID of the run; None if it has none."""
    identifier = _run_ids(directory).get(tracker)
    return identifier if isinstance(identifier, str) else None


def write_run_id(directory: Path, tracker: str, identifier: str) -> None:
    """Store the ID of the run, for when it is resumed."""
    identifiers = _run_ids(directory) | {tracker: identifier}
    with atomic_open(directory / RUN_IDS) as file:
        json.dump(identifiers, file)


def _run_ids(directory: Path) -> dict[str, Any]:
    path = directory / RUN_IDS
    tree = read_json(path, MAX_RUN_IDS_BYTES) if path.is_file() else {}
    return tree if isinstance(tree, dict) else {}
