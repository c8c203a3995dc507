"""The model to be evaluated: a Hugging Face directory or a checkpoint of ours, as the configuration of a run."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

from mindllm.config import RunConfig, read_generation
from mindllm.data import run_tokenizer
from mindllm.data.tokenizers.tokenizer import Tokenizer
from mindllm.evaluate.answers import Answers
from mindllm.evaluate.model import EvaluatedModel
from mindllm.finetune.transform import build_tuned_model
from mindllm.generate.generator import Generator
from mindllm.models.weights import assign, model_weights, values_follow
from mindllm.terminal.progress import Progress, unwatched
from mindllm.train.job.ranks import SINGLE_RANK, Ranks
from mindllm.weight_files import Pretrained, find_pretrained

ANSWERS = "answers"
logger = logging.getLogger(__name__)


def evaluated_model(
    config: RunConfig, directory: Path | None, ranks: Ranks = SINGLE_RANK, progress: Progress = unwatched
) -> EvaluatedModel:
    """Builds the model and loads its weights on the device that is selected; answers are kept below ``directory``.

    Raises:
        UserError: the weights do not fit, or the tokenizer is none.
    """
    tokenizer = run_tokenizer(config)
    pretrained = find_pretrained(config)
    device, model_config = config.context.device_target, pretrained.model(config.model.config)
    with values_follow():
        model = build_tuned_model(model_config, device)
    assign(model_weights(model), pretrained.merged(config.model.config.base))
    generator = Generator(
        model, model_config, tokenizer, device_target=device, shares_prefixes=True, chat_template=config.chat_template
    )
    place = directory / ANSWERS / identity(config, pretrained, tokenizer) if directory is not None else None
    settings = read_generation(pretrained.path)
    if settings:
        listed = ", ".join(f"{key} {value}" for key, value in settings.items())
        logger.info("generation_config.json: %s (settings of a task go first)", listed)
    return EvaluatedModel(generator, config.evaluation.batch_size, Answers(place, ranks), progress, settings)


def identity(config: RunConfig, pretrained: Pretrained, tokenizer: Tokenizer) -> str:
    """What answers depend on: the files of weights and adapter by name, size and time, the architecture, the tokenizer."""
    roots = [Path(pretrained.path), *([Path(pretrained.adapter.path)] if pretrained.adapter else [])]
    files = sorted(path for root in roots for path in ([root] if root.is_file() else root.rglob("*")) if path.is_file())
    stats = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    parts = (
        "settings of generation_config.json",
        stats,
        config.model.config.model_dump_json(),
        tokenizer.fingerprint,
        config.seed,
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
