"""Versions of MindSpore, CANN and the driver, and whether they were published as fitting each other.

The combinations are those of the installation page of MindSpore Transformers 1.9.0
(https://www.mindspore.cn/mindformers/docs/en/r1.9.0/installation.html).
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from mindllm.preflight.finding import Finding, bad, good, unknown
from mindllm.versions import MINDSPORE

PYTHONS = ((3, 10), (3, 12))
PUBLISHED = {  # MindSpore: CANN, driver
    "2.6.0": ("8.1.RC1", "25.0.RC1"),
    "2.7.0": ("8.2.RC1", "25.2.0"),
    "2.7.1": ("8.3.RC1", "25.3.RC1"),
    "2.7.2": ("8.5.0", "25.5.0"),
    "2.9.0": ("9.0.0", "26.0.RC1"),
}
CANN_FILES = (
    "{home}/ascend_toolkit_install.info",
    "{home}/*-linux/ascend_toolkit_install.info",
    "{home}/*-linux/ascend_*_install.info",
    "{home}/version.cfg",
    "{home}/version.info",
)
CANN_HOMES = ("/usr/local/Ascend/ascend-toolkit/latest", "/usr/local/Ascend/cann", "/usr/local/Ascend/latest")
DRIVER_FILES = ("/usr/local/Ascend/driver/version.info",)
INSTALL = "pip install 'mindllm[all]'"  # MindSpore, and what plan, data and evaluate need beside it
VERSION_LINE = re.compile(r"^\s*\"?version\"?\s*[=:]\s*\"?\[?([0-9][\w.]*)", re.IGNORECASE | re.MULTILINE)


def check_versions(needs_devices: bool) -> Iterator[Finding]:
    """Python and MindSpore; CANN and the driver where devices are needed."""
    yield check_python(sys.version_info[:2])
    try:
        mindspore = version("mindspore")
    except PackageNotFoundError:
        yield bad("MindSpore", "is not installed", f"Run: {INSTALL}")
        return
    yield check_mindspore(mindspore)
    if needs_devices:
        homes = [os.environ[name] for name in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME") if name in os.environ]
        yield check_cann(mindspore, find_version([*homes, *CANN_HOMES], CANN_FILES))
        yield check_driver(mindspore, find_version([""], DRIVER_FILES))


def check_python(found: tuple[int, int]) -> Finding:
    """MindSpore has wheels for a few versions."""
    text = ".".join(map(str, found))
    if PYTHONS[0] <= found <= PYTHONS[1]:
        return good("Python", text)
    return bad("Python", text, "Use 3.10, 3.11 or 3.12")


def check_mindspore(found: str) -> Finding:
    """The version that mindllm was measured with."""
    if numbers(found)[:2] == numbers(MINDSPORE)[:2]:
        return good("MindSpore", found)
    return bad("MindSpore", found, f"mindllm runs on {MINDSPORE}: {INSTALL} installs it")


def check_cann(mindspore: str, found: str) -> Finding:
    """CANN beside MindSpore."""
    return _check_pair("CANN", mindspore, found, 0, "Install it and source its set_env.sh")


def check_driver(mindspore: str, found: str) -> Finding:
    """The driver beside MindSpore."""
    return _check_pair("driver", mindspore, found, 1, "Install the Ascend driver and firmware")


def _check_pair(subject: str, mindspore: str, found: str, column: int, install: str) -> Finding:
    exact = PUBLISHED.get(mindspore)
    older = [name for name in PUBLISHED if numbers(name) <= numbers(mindspore)]
    basis = max(older, key=numbers, default=min(PUBLISHED, key=numbers))
    wanted = PUBLISHED[basis][column]
    goes = f"MindSpore {mindspore} goes with {wanted}"
    if exact is None:
        goes = f"no combination is known here for MindSpore {mindspore}; {basis} goes with {wanted}: take that or later"
    if not found:
        return bad(subject, "none is found", f"{install}. {goes[0].upper()}{goes[1:]}")
    if exact is not None:
        if numbers(found) == numbers(wanted):
            return good(subject, f"{found}, as published for MindSpore {mindspore}")
        return bad(subject, f"{found}; {goes}", f"Install {wanted}")
    if numbers(found) < numbers(wanted):
        return bad(subject, f"{found}; {goes}", f"Install {wanted} or later")
    return unknown(subject, f"{found}; {goes}", "See the installation page of MindSpore")


def find_version(homes: list[str], patterns: tuple[str, ...]) -> str:
    """The version that an installation says of itself; empty where there is none."""
    for home in homes:
        for pattern in patterns:
            path = Path(pattern.format(home=home))
            for file in sorted(Path(path.anchor).glob(str(path.relative_to(path.anchor)))):
                if match := VERSION_LINE.search(file.read_text(errors="replace")):
                    return match[1]
    return ""


def numbers(text: str) -> tuple[int, ...]:
    """``8.1.RC1`` as something to compare: a release candidate comes before its release."""
    main, _, candidate = text.upper().partition("RC")
    parts = [int(part) for part in re.findall(r"\d+", main)]
    parts += [0] * (3 - len(parts))
    last = re.search(r"\d+", candidate)
    return (*parts[:3], int(last[0]) if last else 1000)
