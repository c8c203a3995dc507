"""What ``mindllm fetch`` does."""

from __future__ import annotations

from collections.abc import Sequence

from mindllm.cli.parsers.fetch import default_directory, make_parser
from mindllm.command import run_command
from mindllm.fetch.directory import fetch
from mindllm.fetch.huggingface import HuggingFace
from mindllm.fetch.modelscope import ModelScope
from mindllm.terminal.console import error_console, output, print_json
from mindllm.terminal.render import BYTES, drawn

HUBS = {"huggingface": HuggingFace(), "modelscope": ModelScope()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Downloads; returns the exit code."""
    options = make_parser().parse_args(arguments)
    hub = HUBS[options.hub]
    repository = hub.repository(options.name)
    listing = hub.list_files(repository, options.revision, options.include)
    licence = listing.licence or "not told by its model card"
    error_console.print(f"{repository}: {len(listing.files)} files, {listing.size / 1e9:.2f} GB; licence: {licence}")
    if listing.unchecked:
        many, first = len(listing.unchecked), listing.unchecked[0]
        error_console.print(
            f"{hub.title} gives no checksum of {many} of them ({first}, ...): their sizes alone are checked"
        )
    directory = options.output or default_directory(repository)
    with drawn(*BYTES) as progress:
        written = fetch(listing, directory, progress)
    if options.json:
        files = [file.name for file in listing.files]
        told = {"written": str(written), "hub": options.hub, "repository": repository, "licence": listing.licence}
        told |= {"revision": listing.revision, "commit": listing.commit}
        print_json({**told, "bytes": listing.size, "files": files})
    else:
        output.print(f"wrote {written}")
    return 0


if __name__ == "__main__":
    run_command(main)
