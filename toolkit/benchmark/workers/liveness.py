"""Runs one training step of a configuration on the CPU: ``python -m toolkit.benchmark.workers.liveness --config C.yaml``.

Started by ``toolkit.benchmark.liveness`` with the environment that makes MindSpore print the statistics of its memory pool.
"""

from __future__ import annotations

from collections.abc import Sequence

from mindllm.command import CommandParser, run_command
from mindllm.config import load_config


def main(arguments: Sequence[str] | None = None) -> int:
    """One step of a whole model."""
    parser = CommandParser(
        prog="python -m toolkit.benchmark.workers.liveness",
        description="Runs one training step on the CPU.",
        epilog="example: python -m toolkit.benchmark.workers.liveness --config run.yaml",
    )
    parser.add_argument("--config", required=True, help="YAML of the run")
    config = load_config(parser.parse_args(arguments).config)
    import mindspore as ms

    from mindllm.train.distributed_step import build_distributed_step, example_inputs

    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    for value in build_distributed_step(config, 0)(*example_inputs(config)):
        value.asnumpy()
    return 0


if __name__ == "__main__":
    run_command(main)
