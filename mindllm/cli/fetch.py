"""``mindllm fetch``: download a model directory from a hub."""

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

HF_ENDPOINT or MODELSCOPE_ENDPOINT names another hub or a mirror, HF_TOKEN or MODELSCOPE_API_TOKEN a login, HTTPS_PROXY a proxy.
What was interrupted goes on where it was.
"""


def make_parser() -> CommandParser:
    """Returns the parser of the command line."""
    parser = CommandParser(
        prog="mindllm fetch",
        description="Downloads a model directory from Hugging Face's hub or ModelScope: safetensors, architecture, tokenizer, "
        "model card; no pickles and no Python code unless asked for. Each file is checked against the hub's checksum. The "
        "directory is whole or absent.",
        epilog=EXAMPLE,
    )
    parser.add_argument(
        "name",
        metavar="NAME",
        help="ORGANISATION/MODEL, or the address of its page; or a shipped model, as mindllm models lists them",
    )
    parser.add_argument(
        "--output",
        type=output_directory,
        metavar="DIR",
        help="directory to write, absent or empty (default models/MODEL)",
    )
    parser.add_argument(
        "--from",
        dest="hub",
        choices=("huggingface", "modelscope"),
        help="the hub (default: that of the address, else huggingface)",
    )
    parser.add_argument("--revision", metavar="R", help="branch, tag or commit (default main; master on ModelScope)")
    parser.add_argument(
        "--include",
        action="append",
        default=[],
        metavar="PATTERN",
        help="files to take as weights instead of safetensors; repeatable",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def default_directory(repository: str) -> Path:
    """Where a model is written."""
    return Path("models") / repository.rpartition("/")[2]


def main(arguments: Sequence[str] | None = None) -> int:
    """Downloads; returns the exit code."""
    options = make_parser().parse_args(arguments)

    from mindllm.fetch.directory import fetch
    from mindllm.fetch.hub import Address, read_address
    from mindllm.fetch.huggingface import HuggingFace
    from mindllm.fetch.modelscope import ModelScope

    address = read_address(options.name) or Address(options.hub or "huggingface", options.name)
    hub = {"huggingface": HuggingFace, "modelscope": ModelScope}[options.hub or address.hub]()
    repository = hub.repository(address.repository)
    listing = hub.list_files(repository, options.revision or address.revision or None, options.include)
    license_name = listing.license or "not in its model card"
    error_console.print(
        f"{repository}: {len(listing.files)} files, {listing.size / 1e9:.2f} GB; license: {license_name}"
    )
    if listing.unchecked:
        count, first = len(listing.unchecked), listing.unchecked[0]
        error_console.print(f"{hub.title} gives no checksum of {count} files ({first}, ...): only sizes are verified")
    directory = options.output or default_directory(repository)
    with drawn(*BYTES) as progress:
        written = fetch(hub, listing, directory, progress)
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
