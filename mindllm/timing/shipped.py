"""The devices that come with mindllm, by name: what ``--help`` lists without the schema that reads them."""

from __future__ import annotations

from pathlib import Path

DEVICES = Path(__file__).parent / "devices"
DEFAULT = "atlas_800t_a2"
SUFFIX = ".yaml"


def shipped_devices() -> list[str]:
    """Return the names of the devices that come with mindllm."""
    return sorted(path.stem for path in DEVICES.glob(f"*{SUFFIX}"))
