"""A generator as a configuration describes it: the model, the weights of ``load_checkpoint``, the tokenizer."""

from __future__ import annotations

from collections.abc import Mapping

from mindllm.config import ModelConfig, RunConfig
from mindllm.data.tokenizers.tokenizer import Tokenizer
from mindllm.generate.generator import Generator
from mindllm.generate.host import HostModel
from mindllm.train.checkpoint import CheckpointStore
from mindllm.train.checkpoint.pretrained import find_pretrained
from mindllm.train.checkpoint.quantized.held import packed_weights
from mindllm.train.checkpoint.tensors import TensorSource


def need_weights(config: RunConfig) -> None:
    """Raises UserError where no checkpoint is named, with the newest one of the run as an example."""
    if config.load_checkpoint:
        return
    newest = CheckpointStore(f"{config.output_dir}/checkpoint").newest()
    example = f", for example --load_checkpoint {newest}" if newest else ""
    raise config.error(
        "load_checkpoint", f"run_mode {config.run_mode} needs weights; give a checkpoint directory{example}"
    )


def load_generator(config: RunConfig, tokenizer: Tokenizer, on_host: bool = True) -> Generator:
    """Loads the weights, and builds the model on the device of the run unless kernels on the host compute it (``on_host``).

    Raises UserError when they do not fit.
    """
    device, pretrained = config.context.device_target, find_pretrained(config)
    model_config = config.model.config.base
    weights = pretrained.whole(model_config)
    # What an adapter was merged into is not rounded to codes again.
    model_config = model_config.frozen if pretrained.adapter is None else pretrained.model(model_config)
    weights = packed_weights(model_config, weights)
    if on_host and device == "CPU" and HostModel.can_compute(model_config, model_config.seq_length):
        return Generator(HostModel(model_config, weights), model_config, tokenizer)
    return _in_graphs(config, model_config, weights, tokenizer)


def _in_graphs(
    config: RunConfig, model_config: ModelConfig, weights: Mapping[str, TensorSource], tokenizer: Tokenizer
) -> Generator:
    """What MindSpore compiles, whose import is paid for here alone."""
    from mindllm.finetune.transform import build_tuned_model
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
    return Generator(model, model_config, tokenizer, device_target=device)
