"""``python -m toolkit.dry_run``, the name that users of MindFormers know, runs ``mindllm dry-run``."""

from mindllm.cli.registry import VERBS

main = VERBS["dry-run"].run

if __name__ == "__main__":
    from mindllm.command import run_command

    run_command(main)
