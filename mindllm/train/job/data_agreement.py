"""All ranks read the same data: no cache is shared, so nodes whose files differ would train on other batches unnoticed."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np

from mindllm.data.loader import EndlessDataset
from mindllm.errors import RunFailed
from mindllm.launch.heartbeat import named_ranks
from mindllm.train.job.ranks import Ranks

BITS = 48  # of a fingerprint: a double holds it exactly
PROBES = 8  # samples that are compared, spread over the first pass


def data_fingerprint(dataset: EndlessDataset) -> float:
    """A number made of the length of ``dataset`` and of some of its samples, those of the first and the last step among them."""
    count = dataset.samples_per_epoch
    digest = hashlib.sha256(f"{count}".encode())
    for index in sorted({probe * max(0, count - 1) // (PROBES - 1) for probe in range(PROBES)}):
        _add(digest, dataset.sample(index))
    return float(int.from_bytes(digest.digest()[: BITS // 8], "little"))


def _add(digest: hashlib._Hash, sample: Mapping[str, np.ndarray]) -> None:
    for name in sorted(sample):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(sample[name]).tobytes())


def refuse_different_data(dataset: EndlessDataset, ranks: Ranks) -> None:
    """Every rank calls it.

    Raises:
        RunFailed: ranks whose data are not those of the first one, by number; on all ranks.
    """
    if ranks.count == 1:
        return
    own = data_fingerprint(dataset)
    lengths = ranks.sum(
        [float(dataset.samples_per_epoch) if rank == ranks.rank else 0.0 for rank in range(ranks.count)]
    )
    found = ranks.sum([own if rank == ranks.rank else 0.0 for rank in range(ranks.count)])
    if different := [rank for rank, number in enumerate(found) if number != found[0]]:
        first = different[0]
        raise RunFailed(
            f"{named_ranks(different)} read other data than rank 0 ({lengths[first]:.0f} samples a pass there, {lengths[0]:.0f} "
            "here): copy the same files to every node, or read them from a shared directory"
        )
