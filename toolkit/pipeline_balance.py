"""``python -m toolkit.pipeline_balance``, the name that users of MindFormers know, runs ``mindllm plan``."""

from mindllm.cli.registry import VERBS

main = VERBS["plan"].run

if __name__ == "__main__":
    from mindllm.command import run_command

    run_command(main)
