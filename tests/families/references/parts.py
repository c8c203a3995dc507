"""What published descriptions of decoders share, in PyTorch: norm, rotations, ALiBi, attention, and a model as a directory."""

import json
import math
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        return self.weight * hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + self.eps)


class InverseFrequencies(nn.Module):
    """The table ``inv_freq`` that files of this time hold though every model computes it."""

    def __init__(self, width: int, theta: float) -> None:
        super().__init__()
        self.register_buffer("inv_freq", inverse_frequencies(width, theta))


def linear(inputs: int, outputs: int, bias: bool = False) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=bias)


def inverse_frequencies(width: int, theta: float) -> Tensor:
    return 1.0 / theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width)


def rotated_halves(states: Tensor, theta: float) -> Tensor:
    """Rotates coordinates (i, i + width / 2) of ``states`` [batch, heads, length, width] by their positions (GPT-NeoX form)."""
    angles = _angles(states, theta)
    first, second = states.chunk(2, dim=-1)
    return torch.cat(
        (first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), dim=-1
    )


def rotated_pairs(states: Tensor, theta: float) -> Tensor:
    """Rotates neighbouring coordinates (2i, 2i + 1) of ``states`` [batch, heads, length, width] (RoFormer's form)."""
    angles = _angles(states, theta)
    even, odd = states[..., 0::2], states[..., 1::2]
    turned = (even * angles.cos() - odd * angles.sin(), odd * angles.cos() + even * angles.sin())
    return torch.stack(turned, dim=-1).flatten(-2)


def _angles(states: Tensor, theta: float) -> Tensor:
    positions = torch.arange(states.shape[-2], dtype=torch.float32)
    return torch.outer(positions, inverse_frequencies(states.shape[-1], theta))


def alibi_slopes(heads: int) -> Tensor:
    """Slopes of "Train Short, Test Long", section 3: a geometric sequence for a power of two.

    For another number of heads those of the power below, then every other one of the power above.
    """
    power = 2 ** math.floor(math.log2(heads))
    own = [2.0 ** (-8.0 * (index + 1) / power) for index in range(power)]
    between = [2.0 ** (-4.0 * (2 * index + 1) / power) for index in range(heads - power)]
    return torch.tensor(own + between)


def alibi(heads: int, length: int) -> Tensor:
    """What is added to the scores [heads, query, key]: the slope times the (negative) distance back to the key."""
    positions = torch.arange(length)
    return alibi_slopes(heads)[:, None, None] * (positions[None, :] - positions[:, None])


def split_heads(states: Tensor, heads: int) -> Tensor:
    """[batch, length, heads * width] to [batch, heads, length, width]."""
    return states.unflatten(-1, (heads, -1)).transpose(1, 2)


def causal_attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Tensor:
    """Attention of [batch, heads, length, width] with keys of as many or fewer heads; gives [batch, length, heads * width]."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
    if bias is not None:
        scores = scores + bias
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    weights = scores.masked_fill(future, -math.inf).softmax(-1)
    return (weights @ value).transpose(1, 2).flatten(2)


class Reference(nn.Module):
    """A decoder built from the content of its ``config.json``, whose ``state_dict`` has the names of the published files."""

    def __init__(self, config: dict) -> None:
        super().__init__()
        self.config = config

    def randomized(self, seed: int, std: float = 0.3) -> "Reference":
        """Every weight random, norms around 1 and biases around 0, and large enough that logits differ clearly."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                mean = float(parameter.ndim == 1 and name.endswith("weight"))
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std + mean)
        return self.eval()

    @torch.no_grad()
    def greedy(self, input_ids: Tensor, count: int) -> Tensor:
        """The ``count`` most likely tokens after ``input_ids`` [batch, length], each found from the whole row anew."""
        row = input_ids
        for _ in range(count):
            row = torch.cat((row, self(row)[:, -1].argmax(-1, keepdim=True)), dim=1)
        return row[:, input_ids.shape[1] :]

    def save(self, directory: Path, files: int = 1, pickled: bool = False) -> None:
        """Writes ``config.json`` and the weights as they are published: one file, or ``files`` of them with an index."""
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps(self.config, indent=2))
        stem, suffix = ("pytorch_model", "bin") if pickled else ("model", "safetensors")
        tensors = {name: tensor.contiguous() for name, tensor in self.state_dict().items()}
        if files == 1:
            _write(directory / f"{stem}.{suffix}", tensors)
            return
        places = {}
        for index in range(files):
            name = f"{stem}-{index + 1:05d}-of-{files:05d}.{suffix}"
            part = dict(list(tensors.items())[index::files])
            _write(directory / name, part)
            places |= dict.fromkeys(part, name)
        total = sum(tensor.nbytes for tensor in tensors.values())
        index_file = directory / f"{stem}.{suffix}.index.json"
        index_file.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": places}))


def _write(path: Path, tensors: dict[str, Tensor]) -> None:
    if path.suffix == ".bin":
        torch.save(tensors, path)
    else:
        save_file(tensors, path, metadata={"format": "pt"})
