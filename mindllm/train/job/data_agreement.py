"""Check that all ranks read the same data. Nodes with different files would otherwise train on different batches unnoticed."""

from __future__ import annotations

import hashlib

import numpy as np

from mindllm.data.loader import EndlessDataset
from mindllm.errors import RunFailed
from mindllm.launch.heartbeat import named_ranks
from mindllm.train.job.ranks import Ranks

FINGERPRINT_BITS = 48  # a double represents it exactly
SAMPLED = 8  # samples in a fingerprint, spread over the first epoch


def data_fingerprint(dataset: EndlessDataset) -> float:
    """Return a hash of the length of ``dataset`` and of evenly spaced samples, including the first and the last."""
    count = dataset.samples_per_epoch
    digest = hashlib.sha256(f"{count}".encode())
    for index in sorted({number * max(0, count - 1) // (SAMPLED - 1) for number in range(SAMPLED)}):
        sample = dataset.sample(index)
        for name in sorted(sample):
            digest.update(name.encode())
            digest.update(np.ascontiguousarray(sample[name]).tobytes())
    return float(int.from_bytes(digest.digest()[: FINGERPRINT_BITS // 8], "little"))


def require_same_data(dataset: EndlessDataset, ranks: Ranks) -> None:
    """Compare the data of all ranks. Every rank calls it.

    Raises:
        RunFailed: on all ranks, naming the ranks whose data differ from those of rank 0.
    """
    if ranks.count == 1:
        return
    lengths = ranks.gather(float(dataset.samples_per_epoch))
    fingerprints = ranks.gather(data_fingerprint(dataset))
    if different := [rank for rank, number in enumerate(fingerprints) if number != fingerprints[0]]:
        first = different[0]
        raise RunFailed(
            f"{named_ranks(different)} read different data than rank 0 ({lengths[first]:.0f} samples per epoch instead of "
            f"{lengths[0]:.0f}); copy the same files to every node, or read them from a shared directory"
        )
