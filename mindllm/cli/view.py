"""``mindllm view``: show the samples that a model gets."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from mindllm.command import CommandParser, positive, run_command
from mindllm.errors import UserError
from mindllm.terminal.console import output, print_json
from mindllm.terminal.render import passing
from mindllm.terminal.text import styled

if TYPE_CHECKING:
    from mindllm.data import Tokenizer
    from mindllm.train.batches.datasets import RunData

EXAMPLE = """example:
  %(prog)s configs/llama2/finetune_llama2_tiny.yaml --sample 3
  %(prog)s run.yaml --train_dataset.data_loader.config.packing=false --count
"""
COMPARED = ": another row's answer, by which the distance from the reference is estimated"


def make_parser() -> CommandParser:
    """Returns the parser of the command line."""
    parser = CommandParser(
        prog="mindllm view",
        takes_keys=True,
        description="Shows the samples of a run as its model gets them: trained tokens green, those only read dim, documents "
        "that do not see each other apart. Further options change keys of the configuration, as with run_llm.py.",
        epilog=EXAMPLE,
    )
    parser.add_argument(
        "--config", required=True, metavar="YAML", help="the run; also without --config, as the first word"
    )
    parser.add_argument("--sample", type=_number, default=0, metavar="N", help="which sample of the run (default 0)")
    parser.add_argument("--samples", type=positive, default=1, metavar="COUNT", help="how many from there (default 1)")
    parser.add_argument("--ids", action="store_true", help="token by token, with numbers")
    parser.add_argument("--count", action="store_true", help="tokenize all rows of conversations: lengths, truncation")
    parser.add_argument("--json", action="store_true", help="one JSON object for each sample")
    return parser


def _number(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 0 on")
    return value


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints samples, or what the rows come to; returns the exit code."""
    options, overrides = make_parser().parse_known_args(arguments)

    from mindllm.config import load_config
    from mindllm.data.records import kind_of
    from mindllm.train.batches.datasets import RunData

    if kind_of(options.config) not in (None, "json"):
        raise UserError(
            f"{options.config}: is data; name the YAML of the run that reads them, as mindllm finetune writes it"
        )
    with passing() as progress:
        data = RunData(load_config(options.config, overrides), progress=progress)
        if options.count:
            return _count(data, options.json)
        if data.tokenizer is None:
            raise data.config.error("processor.tokenizer.vocab_file", "is empty; showing tokens needs a tokenizer")
        data.dataset  # noqa: B018  (what is told of comes before what is shown)
    for index in range(options.sample, options.sample + options.samples):
        _show(index, data, data.tokenizer, options)
    return 0


def _show(index: int, data: RunData, tokenizer: Tokenizer, options: argparse.Namespace) -> None:
    from mindllm.data.preprocess.view import PADDING, READ, TRAINED, coloured, description, segments

    sample, learnt = data.dataset.sample(index), _learnt(data)
    if options.json:
        print_json(description(index, sample, tokenizer, learnt))
        return
    shown = list(segments(sample, learnt))
    trained = sum(int(segment.trained.sum()) for segment in shown)
    step, row = divmod(index, data.config.global_batch_size)
    output.rule(f"sample {index} (step {step + 1}, row {row}): {len(sample['labels'])} places, {trained} trained")
    output.print(styled(("trained", TRAINED), " ", ("only read", READ)))
    for segment in shown:
        if segment.is_padding:
            output.print(f"{len(segment.labels)} places of padding", style=PADDING)
            continue
        places = f"places {segment.start} to {segment.start + len(segment.labels) - 1}"
        output.rule(places + COMPARED * segment.compared, style="dim", align="left")
        output.print(coloured(segment, tokenizer, ids=options.ids))


def _learnt(data: RunData) -> int | None:
    """How many documents of a row are learnt from, where not all are."""
    config = data.config
    return 1 if config.is_preference_tuning and config.preference.estimates_divergence else None


def _count(data: RunData, as_json: bool) -> int:
    from mindllm.train.batches.row_text import InstructionText, PreferenceText

    if isinstance(data.text, PreferenceText):
        pairs = data.text.counts
        if as_json:
            print_json(asdict(pairs))
        else:
            output.print(pairs.describe(data.model.seq_length))
        return 0
    if not isinstance(data.text, InstructionText):
        raise UserError("--count is about conversations (train_dataset.data_loader.type: CommonDataLoader)")
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
