"""Projections as published formats store them, packed by plain loops or by the library the format comes from."""

import numpy as np
import torch

AWQ_ROWS = (0, 2, 4, 6, 1, 3, 5, 7)


def gptq(codes, scales, zeros, groups, bits, less_one=True):
    """Codes and the zero points and scales of groups: ``[out, in]``, ``[out, groups]``, ``[in]``; word by word."""
    out, width = codes.shape
    count = 32 // bits
    qweight = np.zeros((width // count, out), np.int64)
    for column in range(width):
        qweight[column // count] |= codes[:, column].astype(np.int64) << bits * (column % count)
    qzeros = np.zeros((scales.shape[1], out // count), np.int64)
    for row in range(out):
        qzeros[:, row // count] |= (zeros[row].astype(np.int64) - less_one) << bits * (row % count)
    return {
        "qweight": qweight.astype(np.uint32).view(np.int32),
        "qzeros": qzeros.astype(np.uint32).view(np.int32),
        "scales": scales.T.astype(np.float16),
        "g_idx": groups.astype(np.int32),
    }


def awq(codes, scales, zeros):
    """The same of AWQ, 4 bits."""

    def packed(rows):
        words = np.zeros((len(rows), rows.shape[1] // 8), np.int64)
        for word in range(words.shape[1]):
            for place, row in enumerate(AWQ_ROWS):
                words[:, word] |= rows[:, 8 * word + row].astype(np.int64) << 4 * place
        return words.astype(np.uint32).view(np.int32)

    return {"qweight": packed(codes.T), "qzeros": packed(zeros.T), "scales": scales.T.astype(np.float16)}


def four_bit(weight, kind, double):
    """What bitsandbytes stores of a matrix, and what it makes of it again."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    packed, state = quantize_4bit(torch.from_numpy(weight), quant_type=kind, compress_statistics=double, blocksize=64)
    values = dequantize_4bit(packed, state).numpy()
    stored = {f"weight.{name}": tensor.numpy() for name, tensor in state.as_dict(packed=True).items()}
    return {"weight": packed.numpy(), **stored}, values


def eight_bit(weight):
    """The rows of bitsandbytes' int8, by its own rounding."""
    from bitsandbytes.functional import int8_vectorwise_dequant, int8_vectorwise_quant

    codes, largest, _ = int8_vectorwise_quant(torch.from_numpy(weight).half())
    values = int8_vectorwise_dequant(codes, largest).numpy()
    return {"weight": codes.numpy(), "SCB": largest.float().numpy(), "weight_format": np.uint8(0)}, values


def fp8(weight, block):
    """Blocks of FP8 by torch's own rounding."""
    weight = torch.from_numpy(weight)
    out, width = weight.shape
    factors = torch.ones(-(-out // block), -(-width // block))
    stored = torch.zeros(out, width, dtype=torch.float8_e4m3fn)
    values = torch.zeros(out, width)
    for row in range(factors.shape[0]):
        for column in range(factors.shape[1]):
            at = (slice(row * block, (row + 1) * block), slice(column * block, (column + 1) * block))
            factors[row, column] = weight[at].abs().max() / 448
            stored[at] = (weight[at] / factors[row, column]).to(torch.float8_e4m3fn)
            values[at] = stored[at].float() * factors[row, column]
    import ml_dtypes

    raw = stored.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn)
    return {"weight": raw, "weight_scale_inv": factors.numpy()}, values.numpy()


def hqq(codes, scales, zeros):
    """HQQ's packing by torch, 4 bits; groups along rows."""
    out, width = codes.shape
    groups = torch.from_numpy(codes.reshape(out * scales.shape[1], -1))
    half = len(groups) // 2
    packed = (groups[:half] << 4) | groups[half:]
    return {
        "W_q": packed.numpy(),
        "scale": scales.reshape(-1, 1).astype(np.float16),
        "zero": zeros.reshape(-1, 1).astype(np.float16),
        "shape": np.array([out, width]),
        "nbits": np.int32(4),
    }
