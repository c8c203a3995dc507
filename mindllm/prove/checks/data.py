"""Whether the data will do: files that are there, samples enough for the steps, tokens that the model knows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from mindllm.config import RunConfig
from mindllm.config.dataset import IndexedDataLoader
from mindllm.errors import UserError
from mindllm.files import unexpanded
from mindllm.prove.answers import Answer, Finding, Standing, of_error
from mindllm.prove.pieces import Options
from mindllm.prove.questions import DATA
from mindllm.terminal.progress import Progress
from mindllm.units import counted

if TYPE_CHECKING:
    from mindllm.data.loader import EndlessDataset

PATHS = "train_dataset.data_loader.config.data_path"
STEPS = "runner_config.train_steps"
PROBES = 64  # samples whose tokens are looked at, spread over a pass
MOST_PASSES = 4.0
"""Passes of a corpus up to which repeating it is next to as good as new text (Muennighoff et al., Scaling Data-Constrained
Language Models, 2023)."""


def answers(config: RunConfig, options: Options, progress: Progress) -> Iterator[Answer]:
    """Answer from the files of this machine; where there are none, nothing can be said."""
    if config.run_mode not in ("train", "finetune"):
        yield Answer(DATA, Standing.PROVED, f"run_mode {config.run_mode} learns from no text")
        return
    paths = config.train_dataset.data_loader.config.data_paths
    there = [path for path in paths if _exists(path)]
    if not there:
        yield _nothing_here(paths)
        return
    if len(there) < len(paths):
        missing = tuple(Finding(f"{path} is not there", "", PATHS) for path in paths if path not in there)
        yield Answer(DATA, Standing.REFUTED, f"{len(missing)} of {len(paths)} files are missing", missing)
        return
    from mindllm.train.batches.datasets import RunData

    progress("reading samples")
    try:
        data = RunData(config)
        yield _judged(config, data.dataset, data.total_steps)
    except UserError as error:
        yield Answer(DATA, Standing.REFUTED, "the files cannot be trained on", of_error(error))


def _exists(path: str) -> bool:
    """A file, a directory, or the prefix of indexed files."""
    return Path(path).exists() or Path(f"{path}.idx").is_file() or Path(f"{path}.bin").is_file()


def _nothing_here(paths: tuple[str, ...]) -> Answer:
    if not any(paths):
        reason = Finding("no data is named", "name the files to train on", PATHS)
        return Answer(DATA, Standing.NOT_PROVED, "the YAML names no data", (reason,))
    told = next(filter(None, map(unexpanded, paths)), "")
    reason = Finding(f"{', '.join(paths)}: not on this machine{told}", "prove it where the files are", PATHS)
    return Answer(DATA, Standing.NOT_PROVED, "the files are not on this machine", (reason,))


def _judged(config: RunConfig, dataset: EndlessDataset, steps: int) -> Answer:
    batch, samples = config.global_batch_size, dataset.samples_per_epoch
    passes = steps * batch / samples if samples else float("inf")
    findings = [*_too_few(config, samples, passes), *_unknown_tokens(config, dataset)]
    says = f"{counted(samples, 'sample')} a pass, {counted(steps, 'step')} of {batch:,} take {passes:.2f} passes"
    figures = {"samples_per_pass": samples, "steps": steps, "global_batch": batch, "passes": passes}
    standing = Standing.REFUTED if findings else Standing.PROVED
    evidence = (f"tokens of {min(PROBES, samples)} samples are all below vocab_size",) if not findings else ()
    return Answer(DATA, standing, says, tuple(findings), evidence, figures=figures)


def _too_few(config: RunConfig, samples: int, passes: float) -> Iterator[Finding]:
    batch = config.global_batch_size
    if samples < batch:
        yield Finding(
            f"a pass has {samples:,} samples, a global batch {batch:,}", "give more text, or a smaller batch", PATHS
        )
    elif passes > MOST_PASSES and isinstance(config.train_dataset.data_loader, IndexedDataLoader):
        advice = f"write {int(MOST_PASSES * samples // batch):,} steps or fewer, or give more text"
        yield Finding(
            f"the steps read the text {passes:.1f} times; more than {MOST_PASSES:.0f} teaches little", advice, STEPS
        )


def _unknown_tokens(config: RunConfig, dataset: EndlessDataset) -> Iterator[Finding]:
    """The first token that the model has no embedding of."""
    last, known = max(0, dataset.samples_per_epoch - 1), config.model.config.vocab_size
    for index in sorted({probe * last // (PROBES - 1) for probe in range(PROBES)}):
        for name, values in dataset.sample(index).items():
            if name in ("input_ids", "tokens", "labels") and values.size and int(values.max()) >= known:
                message = f"sample {index} has the token {int(values.max())}, vocab_size is {known}"
                advice = "give the tokenizer's size, or data of this tokenizer"
                yield Finding(message, advice, "model.model_config.vocab_size")
                return
