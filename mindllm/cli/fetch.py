"""``mindllm fetch``: download a model from a hub."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mindllm.command import CommandParser, output_directory, run_command
from mindllm.terminal.console import error_console, output, print_json
from mindllm.terminal.render import BYTES, drawn

EXAMPLE = """examples:
  %(prog)s Qwen/Qwen2.5-0.5B-Instruct
  %(prog)s qwen3_8b --output models/qwen3-8b --revision main
  %(prog)s bartowski/SmolLM2-135M-Instruct-GGUF --include '*Q4_K_M.gguf'
  %(prog)s --from modelscope Qwen/Qwen2.5-0.5B-Instruct
  %(prog)s https://huggingface.co/Qwen/Qwen2.5-0.5B-Instruct

Environment: HF_ENDPOINT or MODELSCOPE_ENDPOINT for another hub or a mirror, HF_TOKEN or MODELSCOPE_API_TOKEN for a
login, HTTPS_PROXY for a proxy. An interrupted download continues.
"""


def make_parser() -> CommandParser:
    """Return the parser of the command line."""
    parser = CommandParser(
        prog="mindllm fetch",
        description="Downloads a model from Hugging Face's hub or ModelScope: safetensors, architecture, tokenizer and model "
        "card, without pickles and Python code unless requested. Files are verified by the checksums of the hub. The "
        "directory is complete or absent.",
        epilog=EXAMPLE,
    )
    add = parser.add_argument
    name = "ORGANIZATION/MODEL, the address of its page, or a shipped model (see mindllm models)"
    add("name", metavar="NAME", help=name)
    directory = "directory to write: absent or empty (default: models/MODEL)"
    add("--output", type=output_directory, metavar="DIR", help=directory)
    hubs = ("huggingface", "modelscope")
    add("--from", dest="hub", choices=hubs, help="the hub (default: that of the address, else huggingface)")
    add("--revision", metavar="R", help="branch, tag or commit (default: main; ModelScope: master)")
    include = "weight files to download instead of safetensors; repeatable"
    add("--include", action="append", default=[], metavar="PATTERN", help=include)
    add("--json", action="store_true", help="print one JSON object")
    return parser


def default_directory(repository: str) -> Path:
    """Return the directory that a model is written to."""
    return Path("models") / repository.rpartition("/")[2]


def main(arguments: Sequence[str] | None = None) -> int:
    """Download a model; return the exit code."""
    options = make_parser().parse_args(arguments)

    from mindllm.fetch.directory import fetch
    from mindllm.fetch.hub import Address, read_address
    from mindllm.fetch.huggingface import HuggingFace
    from mindllm.fetch.modelscope import ModelScope

    address = read_address(options.name) or Address(options.hub or "huggingface", options.name)
    hub = {"huggingface": HuggingFace, "modelscope": ModelScope}[options.hub or address.hub]()
    repository = hub.repository(address.repository)
    listing = hub.list_files(repository, options.revision or address.revision or None, options.include)
    license_name = listing.license or "missing in the model card"
    size = f"{listing.size / 1e9:.2f} GB"
    error_console.print(f"{repository}: {len(listing.files)} files, {size}; license: {license_name}")
    if listing.unchecked:
        count, first = len(listing.unchecked), listing.unchecked[0]
        error_console.print(
            f"{hub.title} has no checksums for {count} files ({first}, ...); only their sizes are verified"
        )
    with drawn(*BYTES) as progress:
        written = fetch(hub, listing, options.output or default_directory(repository), progress)
    if options.json:
        origin = {"hub": options.hub or address.hub, "repository": repository, "licence": listing.license}
        revision = {"revision": listing.revision, "commit": listing.commit}
        files = [file.name for file in listing.files]
        print_json({"written": str(written), **origin, **revision, "bytes": listing.size, "files": files})
    else:
        output.print(f"wrote {written}")
    return 0


if __name__ == "__main__":
    run_command(main)
