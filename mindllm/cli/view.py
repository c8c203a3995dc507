"""``mindllm view``: show the samples of a run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from mindllm.command import CommandParser, non_negative, positive, run_command
from mindllm.errors import UserError
from mindllm.terminal.console import output, print_json
from mindllm.terminal.render import passing
from mindllm.terminal.text import styled

if TYPE_CHECKING:
    from mindllm.data import Tokenizer
    from mindllm.train.batches.datasets import RunData

EXAMPLE = """examples:
  %(prog)s configs/llama2/finetune_llama2_tiny.yaml --sample 3
  %(prog)s run.yaml --train_dataset.data_loader.config.packing=false --count
"""
COMPARED = ": answer of another row (divergence estimate)"


def make_parser() -> CommandParser:
    """Return the parser of the command line."""
    parser = CommandParser(
        prog="mindllm view",
        takes_keys=True,
        description="Shows the samples of a run as its model reads them: trained tokens are green, context is dim, and documents "
        "that do not attend to each other are separated.",
        epilog=EXAMPLE,
    )
    add = parser.add_argument
    parser.add_run()
    add("--sample", type=non_negative, default=0, metavar="N", help="number of the first sample (default: 0)")
    add("--samples", type=positive, default=1, metavar="COUNT", help="number of samples (default: 1)")
    add("--ids", action="store_true", help="show tokens one by one with their ids")
    add("--count", action="store_true", help="tokenize all rows of conversations: lengths, truncation")
    add("--json", action="store_true", help="print one JSON object per sample")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Print samples, or statistics of all rows; return the exit code."""
    options, overrides = make_parser().parse_known_args(arguments)

    from mindllm.config import load_config
    from mindllm.data.records import kind_of
    from mindllm.train.batches.datasets import RunData

    if kind_of(options.run) not in (None, "json"):
        raise UserError(f"{options.run}: is a data file; name the YAML of a run, such as mindllm finetune writes")
    with passing() as progress:
        data = RunData(load_config(options.run, overrides), progress=progress)
        if options.count:
            return _count(data, options.json)
        if data.tokenizer is None:
            raise data.config.error("processor.tokenizer.vocab_file", "is empty; set a tokenizer to show tokens")
        data.dataset  # noqa: B018  (prints notes before the samples)
    for index in range(options.sample, options.sample + options.samples):
        _show(index, data, data.tokenizer, options)
    return 0


def _show(index: int, data: RunData, tokenizer: Tokenizer, options: argparse.Namespace) -> None:
    from mindllm.data.preprocess.view import PADDING, READ, TRAINED, coloured, description, segments

    config, sample = data.config, data.dataset.sample(index)
    # with an estimated divergence, the model trains on the first document of a row only
    trained_documents = 1 if config.is_preference_tuning and config.preference.estimates_divergence else None
    if options.json:
        print_json(description(index, sample, tokenizer, trained_documents))
        return
    parts = list(segments(sample, trained_documents))
    trained = sum(int(segment.trained.sum()) for segment in parts)
    step, row = divmod(index, config.global_batch_size)
    output.rule(f"sample {index} (step {step + 1}, row {row}): {len(sample['labels'])} positions, {trained} trained")
    output.print(styled(("trained", TRAINED), " ", ("context", READ)))
    for segment in parts:
        if segment.is_padding:
            output.print(f"{len(segment.labels)} positions of padding", style=PADDING)
            continue
        positions = f"positions {segment.start} to {segment.start + len(segment.labels) - 1}"
        output.rule(positions + COMPARED * segment.compared, style="dim", align="left")
        output.print(coloured(segment, tokenizer, ids=options.ids))


def _count(data: RunData, as_json: bool) -> int:
    """Print statistics of all rows of conversations; return the exit code."""
    from mindllm.train.batches.row_text import InstructionText, PreferenceText

    if isinstance(data.text, PreferenceText):
        pairs = data.text.counts
        if as_json:
            print_json(asdict(pairs))
        else:
            output.print(pairs.describe(data.model.seq_length))
        return 0
    if not isinstance(data.text, InstructionText):
        raise UserError("--count requires conversations (train_dataset.data_loader.type: CommonDataLoader)")
    counts, length = data.text.counts, data.model.seq_length
    if as_json:
        figures = ("truncated", "without_loss", "tokens", "trained_tokens", "spelled_out")
        print_json({"rows": len(counts.places), **{name: getattr(counts, name) for name in figures}})
    else:
        output.print(counts.describe(length))
        if not data.text.packing and len(counts.places):
            padding = 1 - (counts.tokens - len(counts.places)) / (len(counts.places) * length)
            output.print(f"{padding:.0%} of a batch is padding without train_dataset.data_loader.config.packing")
    return 0


if __name__ == "__main__":
    run_command(main)
