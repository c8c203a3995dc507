"""The version of mindllm, and the MindSpore that it runs on: what checks, errors and help say of it follows from here.

``pyproject.toml`` asks for the same. A sentence such as "MindSpore 2.10 crashes when it compiles a ring" is a measurement of that
version and stays as it is until it is measured again.
"""

from __future__ import annotations

__version__ = "0.2.0"
MINDSPORE_RELEASE = "2.10.0"  # that everything here was verified with
MINDSPORE = ".".join(MINDSPORE_RELEASE.split(".")[:2])
