"""``python -m toolkit.cluster_check``: ``mindllm check`` by the name it had before."""

from mindllm.cli.registry import former

main = former("toolkit.cluster_check")

if __name__ == "__main__":
    from mindllm.command import run_command

    run_command(main)
