"""The strategy of every shipped YAML beside the best that ``mindllm search`` finds for the same devices and global batch.

Both are predicted by one model of time and memory on one device description, so what differs is the strategy. Memory is by
formula: ``mindllm search --dry_run`` measures it. Where nothing faster is found, the YAML's strategy is the best here.
"""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mindllm.command import CommandParser, output_file, run_command
from mindllm.config import load_config
from mindllm.errors import UserError
from mindllm.strategies.search import Planned, evaluate_current, plan_best, search
from mindllm.terminal.console import error_console
from mindllm.timing.device import DEFAULT, Device, read_device
from mindllm.units import GIB
from toolkit.benchmark.report import Tables, keep_rows, kept_rows, write_markdown

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ROOT / "configs"
COLUMNS = ("YAML", "devices", "its strategy", "GB", "tokens/s/device", "best strategy", "GB", "tokens/s/device", "gain")
EXAMPLES = """example:
  python -m toolkit.benchmark.tune_shipped --markdown docs/benchmarks/strategies.md
  python -m toolkit.benchmark.tune_shipped --configs llama2/pretrain_llama2_70b --markdown strategies.md
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Searches for every YAML that is asked for, and writes the page."""
    parser = CommandParser(
        prog="python -m toolkit.benchmark.tune_shipped", description=(__doc__ or "").splitlines()[0], epilog=EXAMPLES
    )
    parser.add_argument(
        "--configs", nargs="+", metavar="NAME", help="below configs/, without .yaml (all that train on several devices)"
    )
    parser.add_argument("--device", default=DEFAULT, metavar="FILE", help="as of mindllm search (default: %(default)s)")
    parser.add_argument("--best", type=int, default=3, metavar="K", help="planned of each (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=5.0, help="for each plan (default: %(default)s)")
    parser.add_argument(
        "--rows", type=output_file, metavar="FILE", help="keeps what was found (JSON) for further sittings"
    )
    parser.add_argument("--markdown", type=output_file, required=True, metavar="FILE", help="the page to write")
    options = parser.parse_args(arguments)
    names, device = options.configs or shipped(), read_device(options.device)
    rows = kept_rows(options.rows, "config", names)
    for name in names:
        rows.append(beside(name, device, options.best, options.seconds))
        rows.sort(key=lambda row: row["config"])
        keep_rows(options.rows, rows)
        write_page(options.markdown, rows, options.device)
    return 0


def shipped() -> list[str]:
    """Names of the shipped YAMLs that train on several devices."""
    found = []
    for path in sorted(set(SHIPPED.glob("*/*.yaml")) - set(SHIPPED.glob("base/*"))):
        config = load_config(path)
        if config.run_mode in ("train", "finetune") and config.parallel_config.device_num > 1:
            found.append(str(path.relative_to(SHIPPED).with_suffix("")))
    return found


def beside(name: str, device: Device, best: int, seconds: float) -> dict[str, Any]:
    """One row: the YAML's strategy and the best that is found; or why there is none."""
    path = SHIPPED / f"{name}.yaml"
    if not path.is_file():
        raise UserError(f"--configs {name}: {path} is not there")
    config = load_config(path)
    devices, limit = config.parallel_config.device_num, config.context.device_memory
    error_console.print(f"{name}: {devices} devices")
    row: dict[str, Any] = {
        "config": name,
        "devices": devices,
        "limit": limit,
        "hand": None,
        "found": None,
        "reason": "",
    }
    try:
        row["hand"] = _told(evaluate_current(config, device))
        with tempfile.TemporaryDirectory(prefix="mindllm_strategies_") as directory:
            judged = search(config, devices, config.global_batch_size, device, limit, Path(directory)).judged
        planned = plan_best(config, judged, device, limit, best, seconds)
    except UserError as error:
        return {**row, "reason": str(error).splitlines()[0].removeprefix(f"{path}:")}
    return (
        {**row, "found": _told(planned[0])}
        if planned
        else {**row, "reason": "no plan of the best candidates fits by the formula"}
    )


def _told(one: Planned) -> dict[str, Any]:
    return {"strategy": one.candidate.name, "speed": one.step.tokens_per_device, "memory": max(one.memory)}


def write_page(path: Path, rows: Sequence[Mapping[str, Any]], device: str) -> None:
    """Writes the page with the command that finds its rows in one sitting."""
    names = [row["config"] for row in rows]
    chosen = [] if names == shipped() else ["--configs", *names]
    command = shlex.join(["python", "-m", "toolkit.benchmark.tune_shipped", *chosen, "--markdown", str(path)])
    described = f"{(__doc__ or '').strip()}\n\nDevice: {device}. Gains are of tokens/s/device."
    write_markdown(path, "Shipped strategies beside the best that are found", described, command, tables(rows), "Read")


def tables(rows: Sequence[Mapping[str, Any]]) -> Tables:
    """All that were compared; and, by reason, those that were not."""
    compared = [row for row in rows if row["hand"] and row["found"]]
    found: list[Any] = [("Strategies", COLUMNS, [_line(row) for row in compared])]
    if missing := [(row["config"], row["reason"]) for row in rows if not (row["hand"] and row["found"])]:
        found.append(("Not compared", ("YAML", "reason"), missing))
    return found


def _line(row: Mapping[str, Any]) -> tuple[str, ...]:
    hand, best = row["hand"], row["found"]
    gain = round(best["speed"]) / round(hand["speed"]) - 1  # of the figures that are shown
    fits = "" if hand["memory"] <= row["limit"] else f" (over {row['limit'] / GIB:g})"
    told = [
        row["config"],
        str(row["devices"]),
        hand["strategy"],
        f"{hand['memory'] / GIB:.0f}{fits}",
        f"{hand['speed']:,.0f}",
    ]
    if gain <= 0:
        return *told, "the YAML's", "", "", "is best"
    return *told, best["strategy"], f"{best['memory'] / GIB:.0f}", f"{best['speed']:,.0f}", f"{gain:+.1%}"


if __name__ == "__main__":
    run_command(main)
