"""Directories as ``mindllm offline`` keeps them, unpacked from ``kept_programs``."""

import gzip
import shutil
from pathlib import Path

KEPT = Path(__file__).parent / "kept_programs"


def unpacked(name, directory):
    """Writes a kept run below ``directory``; returns where it is."""
    for source in sorted((KEPT / name).rglob("*.gz")):
        target = directory / name / source.parent.name / source.name
        target.parent.mkdir(parents=True, exist_ok=True)
        if not source.name.endswith(".json.gz") or source.name.startswith("parameters"):
            target.with_suffix("").write_bytes(gzip.decompress(source.read_bytes()))
        else:
            shutil.copyfile(source, target)
    return directory / name
