"""Cross checks of the section ``generation``: ways of choosing tokens that exclude each other."""

from __future__ import annotations

from collections.abc import Iterator

from mindllm.config.reading.document import KeyPath
from mindllm.config.run import RunConfig

GENERATION: KeyPath = ("generation",)


def check_generation(config: RunConfig) -> Iterator[tuple[KeyPath, str]]:
    """Beam search, sampling, and how many continuations either gives."""
    options = config.generation
    beams, count = options.num_beams, options.num_return_sequences
    if beams > 1 and options.do_sample:
        yield (*GENERATION, "do_sample"), f"beam search does not draw; write false, or num_beams: 1 (value {beams})"
    if beams > 1 and options.stops:
        yield (
            (*GENERATION, "stop_strings"),
            f"beam search ends at the end of text only; write num_beams: 1 (value {beams})",
        )
    if beams > 1 and count > beams:
        message = f"{beams} beams give at most as many continuations (value {count}); write a larger num_beams"
        yield (*GENERATION, "num_return_sequences"), message
    if beams == 1 and count > 1 and not options.do_sample:
        message = f"there is one most likely token (value {count}); write do_sample: true, or a larger num_beams"
        yield (*GENERATION, "num_return_sequences"), message
    if config.run_mode == "chat" and max(beams, count) > 1:
        key = "num_beams" if beams > 1 else "num_return_sequences"
        yield (*GENERATION, key), f"run_mode chat writes one answer as it grows (value {max(beams, count)}); write 1"
