"""``python -m toolkit.ir_inspect``, the name that users of MindFormers know, runs ``mindllm inspect``."""

from mindllm.cli.registry import VERBS

main = VERBS["inspect"].run

if __name__ == "__main__":
    from mindllm.command import run_command

    run_command(main)
