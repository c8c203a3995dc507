"""What ``mindllm weights`` does."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from mindllm.cli.parsers.weights import FORMER_QUANTIZE, make_parser
from mindllm.cli.registry import spelled
from mindllm.command import run_command
from mindllm.terminal.console import error_console, output, print_json
from mindllm.terminal.progress import Progress
from mindllm.terminal.render import BYTES, drawn

QUANTIZE = "quantize", FORMER_QUANTIZE


def main(arguments: Sequence[str] | None = None) -> int:
    """Converts or describes; returns the exit code."""
    options = make_parser().parse_args(arguments)
    if options.command == "info":
        from mindllm.weights.convert import checkpoint_in
        from mindllm.weights.info import describe, description_table

        description = describe(checkpoint_in(options.path))
        print_json(description) if options.json else output.print(description_table(description))
        return 0
    with drawn(*([] if options.command in QUANTIZE else BYTES)) as progress:
        path = _convert(options, progress)
    print_json({"written": str(path)}) if options.json else output.print(f"wrote {path}")
    return 0


def _convert(options: argparse.Namespace, progress: Progress) -> Path:
    from mindllm.weights.adapters import export_adapter, merge, unmerge
    from mindllm.weights.convert import checkpoint_in, export_weights, import_weights

    for named in ("source", "adapter", "base"):
        if (path := getattr(options, named, None)) is not None:
            setattr(options, named, checkpoint_in(path))
    if options.command == "adapter":
        return export_adapter(options.source, options.target)
    if options.command in ("merge", "unmerge"):
        written = {"dtype": options.dtype, "max_shard_bytes": options.max_shard_size}
        if options.command == "merge":
            return merge(options.source, options.target, options.base, written, progress)
        return unmerge(options.source, options.adapter, options.target, written, progress)
    if options.command == FORMER_QUANTIZE:
        error_console.print(f"{FORMER_QUANTIZE}: a former name; write {spelled('weights')} quantize")
    if options.command in QUANTIZE:
        from mindllm.weights.quantize import Options, quantize_weights

        chosen = Options.among(vars(options))
        return quantize_weights(options.source, options.target, chosen, options.dtype, options.max_shard_size, progress)
    if options.command == "import":
        return import_weights(options.source, options.target, options.model, progress)
    written_as = options.dtype, options.max_shard_size, options.tokenizer
    return export_weights(options.source, options.target, *written_as, progress)


if __name__ == "__main__":
    run_command(main)
