"""How long a command takes to its first token, on its first start and on its second, beside transformers doing the same.

Every start is a process of its own, timed from outside: from starting it to the first character behind the prompt on its standard
output. A first start has an empty cache. Starts of all sides take turns, so that noise of the machine falls on all.
"""

from __future__ import annotations

import os
import re
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from mindllm.command import CommandParser, run_command
from mindllm.errors import RunFailed, UserError
from mindllm.terminal.console import output, print_json, track
from mindllm.terminal.tables import Table, texts
from toolkit.benchmark.report import write_markdown
from toolkit.benchmark.side import ROOT, spread
from toolkit.benchmark.workers.first_token import SIDES

EXAMPLES = """example:
  python -m toolkit.benchmark.first_token --model models/smollm2 --markdown docs/benchmarks/first_token.md
"""
WORKER = "toolkit.benchmark.workers.first_token"
COLUMNS = ("side", "start", "first token s", "tokens/s", "all s", "processor s")
SPEED = re.compile(r"decode: \d+ tokens, ([\d.]+) tokens/s")
DESCRIPTION = """Seconds from starting the command to its first token, for one prompt, with greedy choice in fp32.

`mindllm`: the command as it is. `mindllm in graphs`: the same where kernels on the host do not compute the model, so that it is
compiled. `transformers`: imports, `from_pretrained`, `generate` with a streamer, on torch's CPU back end. A first start has an
empty cache, so the kernels are built in it, too. Median, lowest and highest; processor seconds are those of the process and its
children."""


@dataclass(frozen=True)
class Start:
    """What one start took."""

    side: str
    kept: bool
    first_s: float
    tokens_per_s: float
    all_s: float
    processor_s: float
    text: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Starts all sides in turns; returns 0."""
    parser = CommandParser(prog="python -m toolkit.benchmark.first_token", description=__doc__, epilog=EXAMPLES)
    parser.add_argument("--model", type=Path, required=True, help="directory of Hugging Face, with a tokenizer")
    parser.add_argument("--prompt", default="The capital of France is", help="what is continued")
    parser.add_argument("--tokens", type=int, default=48, help="of a continuation (default: 48)")
    parser.add_argument("--rounds", type=int, default=3, help="of all sides (default: 3)")
    parser.add_argument("--sides", nargs="*", choices=SIDES, default=list(SIDES), help="all, if not given")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="writes the table there, too")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options = parser.parse_args(arguments)
    if min(options.rounds, options.tokens - 1) < 1:
        raise UserError("--rounds is at least 1, and --tokens at least 2: of one token no speed is known")
    found: list[Start] = []
    for _ in track(range(options.rounds), "rounds"):
        for side in options.sides:
            with tempfile.TemporaryDirectory(prefix="mindllm_first_token_") as directory:
                for kept in (False, True) if side != "transformers" else (True,):
                    found.append(start(side, kept, options.model, options.prompt, options.tokens, Path(directory)))
    table = rows(found)
    if options.markdown:
        given = shlex.join(sys.argv[1:] if arguments is None else arguments)
        command = f"python -m toolkit.benchmark.first_token {given}"
        caption = f"{options.tokens} tokens after {options.prompt!r}"
        write_markdown(options.markdown, "The first token", DESCRIPTION, command, [(caption, COLUMNS, table)])
    if options.json:
        print_json({"starts": [asdict(item) for item in found]})
    else:
        output.print(Table("", texts(*COLUMNS), table))
    return 0


def start(side: str, kept: bool, model: Path, prompt: str, tokens: int, directory: Path) -> Start:
    """Starts one side and reads what it writes; ``directory`` has its cache. Raises RunFailed when it fails."""
    path = directory / "run.yaml"
    config: dict[str, Any] = {"run_mode": "predict", "load_checkpoint": str(model.absolute()), "input_data": prompt}
    config |= {"use_parallel": False, "context": {"device_target": "CPU"}, "generation": {"max_new_tokens": tokens}}
    config |= {"model": {"model_config": {"compute_dtype": "float32"}}, "output_dir": str(directory / "output")}
    path.write_text(yaml.safe_dump(config))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(directory / "cache")}
    before, begun = _processor_seconds(), time.perf_counter()
    with open(directory / "errors", "w+") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", WORKER, side, str(path)],
            stdout=subprocess.PIPE,
            stderr=errors,
            cwd=directory,
            env=environment,
        )
        text, first = _read(process, prompt, begun)
        code = process.wait()
        ended = time.perf_counter()
        errors.seek(0)
        said = errors.read()
    speed = SPEED.search(said)
    if code or first is None or speed is None:
        raise RunFailed(f"the side {side} failed:\n{said[-3000:]}")
    taken = _processor_seconds() - before
    return Start(side, kept, first - begun, float(speed[1]), ended - begun, taken, text)


def _read(process: subprocess.Popen[bytes], prompt: str, begun: float) -> tuple[str, float | None]:
    """All that a process writes, and when the first byte behind the prompt came."""
    assert process.stdout is not None
    written, first = b"", None
    while piece := os.read(process.stdout.fileno(), 1 << 16):
        written += piece
        if first is None and len(written) > len(prompt.encode()):
            first = time.perf_counter()
    return written.decode(errors="replace"), first


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def rows(found: Sequence[Start]) -> list[tuple[str, ...]]:
    """The lines of the table, in the order of the sides."""
    lines: list[tuple[str, ...]] = []
    for side, kept in dict.fromkeys((item.side, item.kept) for item in found):
        of_both = [item for item in found if (item.side, item.kept) == (side, kept)]
        name = "mindllm in graphs" if side == "graphs" else side
        which = "every" if side == "transformers" else ("second" if kept else "first")
        firsts, speeds = [item.first_s for item in of_both], [item.tokens_per_s for item in of_both]
        alls = [item.all_s for item in of_both]
        taken = f"{statistics.median(item.processor_s for item in of_both):.1f}"
        lines.append((name, which, spread(firsts, 2), spread(speeds, 1), spread(alls, 1), taken))
    return lines


if __name__ == "__main__":
    run_command(main)
