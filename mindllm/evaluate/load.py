"""The model to be evaluated: a Hugging Face directory or a checkpoint of ours, as the configuration of a run."""

from __future__ import annotations

import hashlib
from pathlib import Path

from mindllm.config import RunConfig, is_hugging_face, read_model_config
from mindllm.config.dataset import TOKENIZER_FILES
from mindllm.config.generation import EvaluationConfig
from mindllm.config.precision import FLOAT32, TYPES, narrow_types
from mindllm.data import run_tokenizer
from mindllm.data.tokenizers.tokenizer import Tokenizer
from mindllm.errors import UserError
from mindllm.evaluate.answers import Answers
from mindllm.evaluate.model import EvaluatedModel
from mindllm.finetune.transform import build_tuned_model
from mindllm.generate.generator import Generator
from mindllm.models.weights import assign, model_weights
from mindllm.terminal.progress import Progress, unwatched
from mindllm.train.checkpoint import load_checkpoint
from mindllm.train.checkpoint.loading import model_of
from mindllm.train.checkpoint.pretrained import Pretrained, find_pretrained
from mindllm.train.checkpoint.tensors import stored_tensors
from mindllm.train.job.ranks import ALONE, Ranks

ANSWERS = "answers"


def run_of(
    model: Path, options: EvaluationConfig, tokenizer: Path | None = None, progress: Progress = unwatched
) -> RunConfig:
    """The configuration of an evaluation of ``model``, whose architecture and tokenizer it says itself.

    ``progress`` is told where another type is computed in than the checkpoint's.

    Raises:
        UserError: it is no model, or its tokenizer is nowhere; then name one.
    """
    if is_hugging_face(model):
        architecture, beside = read_model_config(model), _tokenizer_in(model)
    else:
        checkpoint = load_checkpoint(model, option="--model", with_optimizer=False, read=stored_tensors)
        architecture, beside = model_of(checkpoint), str(checkpoint.state.get("tokenizer") or "")
    for narrow in sorted({*narrow_types(architecture).values()}):
        progress(f"computing in float32, which is faster on a CPU than the checkpoint's {narrow}")
    file = str(tokenizer or beside)
    if not file or not Path(file).exists():
        where = f"{file} is not there any more" if file else "it names none"
        raise UserError(f"{model}: no tokenizer, {where}; give --tokenizer FILE")
    config = RunConfig.model_validate(
        {
            "run_mode": "eval",
            "load_checkpoint": str(model),
            "use_parallel": False,
            "context": {"device_target": "CPU", "enable_graph_kernel": False},
            "processor": {"tokenizer": {"vocab_file": file}},
            "model": {"model_config": architecture.model_dump(exclude_unset=True) | dict.fromkeys(TYPES, FLOAT32)},
            "evaluation": options.model_dump(),
        }
    )
    config.model.config.name_projections(architecture.known_projections)
    return config


def evaluated_model(
    config: RunConfig, directory: Path | None, ranks: Ranks = ALONE, progress: Progress = unwatched
) -> EvaluatedModel:
    """Builds the model and loads its weights on the device that is selected; answers are kept below ``directory``.

    Raises:
        UserError: the weights do not fit, or the tokenizer is none.
    """
    tokenizer = run_tokenizer(config)
    pretrained = find_pretrained(config)
    device, model_config = config.context.device_target, pretrained.model(config.model.config)
    model = build_tuned_model(model_config, device)
    assign(model_weights(model), pretrained.whole(config.model.config.base))
    generator = Generator(model, model_config, tokenizer, device_target=device, shares_prefixes=True)
    place = directory / ANSWERS / identity(config, pretrained, tokenizer) if directory is not None else None
    return EvaluatedModel(generator, config.evaluation.batch_size, Answers(place, ranks), progress)


def identity(config: RunConfig, pretrained: Pretrained, tokenizer: Tokenizer) -> str:
    """What answers depend on: the files of weights and adapter by name, size and time, the architecture, the tokenizer."""
    roots = [Path(pretrained.path), *([Path(pretrained.adapter.path)] if pretrained.adapter else [])]
    files = sorted(path for root in roots for path in ([root] if root.is_file() else root.rglob("*")) if path.is_file())
    stats = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    parts = (stats, config.model.config.model_dump_json(), tokenizer.fingerprint, config.seed)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _tokenizer_in(directory: Path) -> str:
    return next((str(directory / name) for name in TOKENIZER_FILES if (directory / name).is_file()), "")
