"""A generator as a configuration describes it: the model, the weights of ``load_checkpoint``, the tokenizer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from mindllm.config import ModelConfig, RunConfig
from mindllm.data.tokenizers.tokenizer import Tokenizer
from mindllm.generate.generator import Generator
from mindllm.generate.host import HostModel
from mindllm.train.checkpoint import CheckpointStore
from mindllm.train.checkpoint.tensors import TensorSource
from mindllm.weight_files import find_pretrained, packed_weights


def need_weights(config: RunConfig) -> None:
    """Raises UserError where no checkpoint is named, with the newest one of the run as an example."""
    if config.load_checkpoint:
        return
    newest = CheckpointStore(f"{config.output_dir}/checkpoint").newest()
    example = f", for example --load_checkpoint {newest}" if newest else ""
    raise config.error(
        "load_checkpoint", f"run_mode {config.run_mode} needs weights; give a checkpoint directory{example}"
    )


@dataclass(frozen=True)
class Found:
    """The weights of a run and the model they are of; on the host, where kernels compute it there: then they have been read."""

    model_config: ModelConfig
    weights: Mapping[str, TensorSource]
    host: HostModel | None


def find_weights(config: RunConfig, on_host: bool = True) -> Found:
    """Finds the weights of ``load_checkpoint``, and reads them if kernels on the host compute the model and ``on_host``.

    Raises UserError when they do not fit.
    """
    pretrained = find_pretrained(config)
    model_config = config.model.config.base
    weights = pretrained.merged(model_config)
    # What an adapter was merged into is not rounded to codes again.
    model_config = model_config.frozen if pretrained.adapter is None else pretrained.model(model_config)
    weights = packed_weights(model_config, weights)
    on_host = on_host and config.context.device_target == "CPU"
    fits = on_host and HostModel.can_compute(model_config, model_config.seq_length)
    return Found(model_config, weights, HostModel(model_config, weights) if fits else None)


@contextlib.contextmanager
def finding_weights(config: RunConfig) -> Iterator[Future[Found]]:
    """Calls :func:`find_weights` in a thread while what is inside is done, which reads a tokenizer."""
    need_weights(config)
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(find_weights, config)


def load_generator(config: RunConfig, tokenizer: Tokenizer, found: Found | None = None) -> Generator:
    """The generator of a run; ``found``: what :func:`find_weights` has given, if it was called before.

    Raises UserError when the weights do not fit.
    """
    found = found or find_weights(config)
    if found.host is not None:
        return Generator(found.host, found.model_config, tokenizer, chat_template=config.chat_template)
    return _in_graphs(config, found.model_config, found.weights, tokenizer)


def _in_graphs(
    config: RunConfig, model_config: ModelConfig, weights: Mapping[str, TensorSource], tokenizer: Tokenizer
) -> Generator:
    """What MindSpore compiles, whose import is paid for here alone."""
    from mindllm.finetune.transform import build_tuned_model
    from mindllm.generate.graphs.kept import KeptGraphs
    from mindllm.generate.graphs.quantized_linear import use_quantized_products
    from mindllm.models import Kernels
    from mindllm.models.weights import assign, model_weights, quantized_parameters, values_follow
    from mindllm.train.device import set_up_device

    device = config.context.device_target
    set_up_device(config)
    with values_follow():
        model = build_tuned_model(model_config, device)
    assign({**model_weights(model), **quantized_parameters(model)}, weights)
    if device == "Ascend":
        use_quantized_products(model, model_config, Kernels.choose(model_config, device))
    return Generator(
        model,
        model_config,
        tokenizer,
        device_target=device,
        kept=KeptGraphs(config, model_config),
        chat_template=config.chat_template,
    )
