"""The scalars of a run where people watch it: TensorBoard's event files, Weights & Biases, MLflow. Each is an extra.

What is shown is what the metrics hold; nothing leaves this machine unless the configuration says so. A tracker that fails,
because a disk is full or a server is away, is told once and costs no step of training.
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
IDENTITIES = (
    "trackers.json"  # below the output directory: under which name a tracker knows the run, also when it is resumed
)
LARGEST_IDENTITIES = 1 << 16

TrackerConfig = TensorBoardConfig | WandbConfig | MlflowConfig


class Tracker(Protocol):
    """A place where a run is watched."""

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Take the finite scalars of a step."""

    def close(self) -> None:
        """Write what is left."""


class TrackerMonitor(Callback):
    """Gives a tracker the scalars of every ``collect_freq``-th step, and of those that were evaluated.

    Raises:
        ModuleNotFoundError: the library of the tracker is not installed; which extra brings it is known to
            :mod:`mindllm.extras`.
    """

    first_rank_only = True

    def __init__(self, section: TrackerConfig) -> None:
        self.section = section
        self._open = TRACKERS[type(section)].library()
        self._tracker: Tracker | None = None

    def begin(self, state: RunState) -> None:
        """Open the tracker, which goes on where a resumed run does."""
        try:
            self._tracker = self._open(self.section, state)
        except Exception as error:  # of any library: whatever it is, it is none of training
            self._give_up(error)

    def step_end(self, state: RunState, record: StepRecord) -> None:
        """Pass on the scalars of a step."""
        if self._tracker is None or (record.step % self.section.collect_freq and not state.scores):
            return
        try:
            self._tracker.log(record.step, scalars_of(state, record))
        except Exception as error:
            self._give_up(error)

    def close(self) -> None:
        """Close the tracker."""
        tracker, self._tracker = self._tracker, None
        try:
            if tracker is not None:
                tracker.close()
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._tracker = None
        logger.error("callbacks: %s shows no more steps of this run: %s", self.section.type, error)


class TensorBoard:
    """Event files as TensorBoard, and tools that read them, expect. ``tensorboardX`` alone is needed."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    @staticmethod
    def library() -> Any:
        """Import the library; return what opens the tracker."""
        from tensorboardX import SummaryWriter

        def opened(section: TensorBoardConfig, state: RunState) -> TensorBoard:
            directory = section.log_dir or str(state.output_dir / "tensorboard")
            start = state.step + 1 if state.step else None  # a resumed run writes the steps from here on once more
            return TensorBoard(SummaryWriter(directory, purge_step=start, filename_suffix=f".{state.step}"))

        return opened

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Append the scalars and flush them."""
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


class Wandb:
    """A run of Weights & Biases; offline it lies below the output directory until ``wandb sync`` takes it."""

    def __init__(self, run: Any) -> None:
        self._run = run

    @staticmethod
    def library() -> Any:
        """Import the library; return what opens the tracker."""
        import wandb

        def opened(section: WandbConfig, state: RunState) -> Wandb:
            quiet = wandb.Settings(silent=True, console="off")
            run = wandb.init(
                project=section.project,
                name=section.name or state.config.trainer.model_name,
                id=identity(state.output_dir, section.type),
                resume="allow",
                mode=section.mode,
                dir=str(state.output_dir),
                config=tree_of(state.config),
                settings=quiet,
            )
            return Wandb(run)

        return opened

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Log the scalars of a step; of a step that the run already has, W&B takes none."""
        self._run.log(dict(scalars), step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class Mlflow:
    """A run of MLflow, in a data base below the output directory or on a server."""

    def __init__(self, client: Any, run: str, metric: Any) -> None:
        self._client, self._run, self._metric = client, run, metric

    @staticmethod
    def library() -> Any:
        """Import the library; return what opens the tracker."""
        from mlflow import MlflowClient
        from mlflow.entities import Metric

        for talkative in ("mlflow", "alembic"):
            logging.getLogger(talkative).setLevel(logging.WARNING)

        def opened(section: MlflowConfig, state: RunState) -> Mlflow:
            here = state.output_dir.resolve()
            client = MlflowClient(section.tracking_uri or f"sqlite:///{here / 'mlflow.db'}")
            run = kept_identity(here, section.type)
            if run is None:
                place = None if section.tracking_uri else (here / "mlflow").as_uri()
                found = client.get_experiment_by_name(section.experiment)
                of = found.experiment_id if found else client.create_experiment(section.experiment, place)
                run = client.create_run(of, run_name=section.name or state.config.trainer.model_name).info.run_id
                keep_identity(here, section.type, run)
                client.log_text(run, render_config(state.config), "run.yaml")
            return Mlflow(client, run, Metric)

        return opened

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Log the scalars of a step at once."""
        now = int(time.time() * 1000)
        self._client.log_batch(self._run, [self._metric(name, value, now, step) for name, value in scalars.items()])

    def close(self) -> None:
        """End the run."""
        self._client.set_terminated(self._run)


TRACKERS: Mapping[type, Any] = {TensorBoardConfig: TensorBoard, WandbConfig: Wandb, MlflowConfig: Mlflow}


def identity(directory: Path, tracker: str) -> str:
    """Return the name under which a tracker knows the run of an output directory: drawn once, then kept."""
    known = kept_identity(directory, tracker)
    if known is None:
        known = uuid.uuid4().hex[:12]
        keep_identity(directory, tracker, known)
    return known


def kept_identity(directory: Path, tracker: str) -> str | None:
    """Return the name of the run that is kept; None where there is none."""
    kept = _identities(directory).get(tracker)
    return kept if isinstance(kept, str) else None


def keep_identity(directory: Path, tracker: str, name: str) -> None:
    """Keep the name of the run for when it is resumed."""
    kept = _identities(directory) | {tracker: name}
    with atomic_open(directory / IDENTITIES) as file:
        json.dump(kept, file)


def _identities(directory: Path) -> dict[str, Any]:
    path = directory / IDENTITIES
    tree = read_json(path, LARGEST_IDENTITIES) if path.is_file() else {}
    return tree if isinstance(tree, dict) else {}
