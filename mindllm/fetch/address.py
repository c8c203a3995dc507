"""What a page of a hub's site is about, as a browser's address line has it: the hub, the model's name, a revision."""

from __future__ import annotations

import re
from dataclasses import dataclass

from mindllm.errors import UserError

HUBS = {  # by the last two parts of the host's name
    "huggingface.co": "huggingface",
    "hf.co": "huggingface",
    "hf-mirror.com": "huggingface",
    "modelscope.cn": "modelscope",
    "modelscope.ai": "modelscope",
}
OF_FILES = ("tree", "blob", "resolve", "file", "files", "raw", "commit")  # behind the name, before a revision
OTHERS = {"datasets": "a data set", "spaces": "a program"}
USUAL = ("main", "master")


@dataclass(frozen=True)
class Address:
    """A model on a hub; ``revision`` is empty for the usual one."""

    hub: str
    repository: str
    revision: str = ""


def read_address(text: str) -> Address | None:
    """Return the model whose page an address shows, with ``https://`` or without; None: it is no address of a hub.

    Raises:
        UserError: it is the address of something else there.
    """
    place = re.sub(r"^\w+://", "", text)
    host, _, path = place.partition("/")
    name = ".".join(host.lower().split(":")[0].split(".")[-2:])
    if name not in HUBS:
        return None
    parts = [part for part in re.split(r"[?#]", path)[0].split("/") if part]
    if parts[:1] and parts[0] in OTHERS:
        raise UserError(f"{text}: is the page of {OTHERS[parts[0]]}, not of a model; give ORGANISATION/MODEL")
    if HUBS[name] == "modelscope" and parts[:1] == ["models"]:
        parts = parts[1:]
    if len(parts) < 2:
        raise UserError(f"{text}: is the page of no model; give ORGANISATION/MODEL")
    behind = [part for part in parts[2:] if part != "view"]  # ModelScope's pages of files
    revision = behind[1] if len(behind) > 1 and behind[0] in OF_FILES and behind[1] not in USUAL else ""
    return Address(HUBS[name], "/".join(parts[:2]), revision)
