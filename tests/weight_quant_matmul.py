"""What Ascend's ``WeightQuantBatchMatmul`` is documented to multiply by, made of the tensors that it is given."""

import numpy as np


def documented_matrix(codes, scales, offsets, group, bits, dtype=np.float32):
    """``[in, out]``: ``(code + offset) · scale`` of signed codes, with both of the group that a row is in (0: one for all rows).

    Of 4 bits there are two in a byte, neighbours of a row, the first in the low bits. Rounded to ``dtype`` after each step.
    """
    numbers = codes.astype(np.int16)
    if bits == 4:
        numbers = np.stack([numbers & 15, (numbers >> 4) & 15], axis=-1).reshape(len(codes), -1)
        numbers = np.where(numbers > 7, numbers - 16, numbers)
    group_of = np.arange(len(codes)) // (group or len(codes))
    added = numbers.astype(dtype)
    if offsets is not None:
        added = (added + offsets.astype(dtype)[group_of]).astype(dtype)
    return (added * scales.astype(dtype)[group_of]).astype(dtype)
