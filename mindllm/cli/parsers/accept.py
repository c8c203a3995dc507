"""The options of ``mindllm accept``."""

from __future__ import annotations

from mindllm.cli.registry import spelled
from mindllm.command import CommandParser, output_directory, positive
from mindllm.timing.shipped import DEFAULT, shipped_devices

CLAIMS = "single, dp, tp, pp, ep, optimizer, recompute, resume"
EXAMPLES = """examples:
  %(prog)s --devices 8 --output accept
  %(prog)s --claims dp,tp --keep

Exit codes: 0 good, 1 a run failed or no claim was run, 2 wrong input, 3 a claim is refuted.
"""


def make_parser() -> CommandParser:
    """Return the parser of the command line."""
    parser = CommandParser(
        prog=spelled("accept"),
        description="Holds what mindllm claims against a few small runs: on Ascend devices where there are some, otherwise as "
        "processes of this CPU. Leaves one page, and one archive without names, paths or addresses. Installs nothing.",
        epilog=EXAMPLES,
    )
    parser.add_argument(
        "--devices", type=positive, metavar="N", help="devices, or ranks on a CPU (default: all that are here, or 2)"
    )
    parser.add_argument(
        "--output",
        type=output_directory,
        default="accept",
        metavar="DIR",
        help="for page and archive (default: %(default)s)",
    )
    parser.add_argument(
        "--device",
        default=DEFAULT,
        metavar="FILE",
        help=f"what steps and links are predicted for: a YAML, or one of {', '.join(shipped_devices())} (default: %(default)s)",
    )
    parser.add_argument("--claims", default="", metavar="LIST", help=f"some of {CLAIMS} (default: all)")
    parser.add_argument("--keep", action="store_true", help="keep the runs; those that failed are kept anyway")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    return parser
