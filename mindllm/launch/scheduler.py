"""The process that tells MindSpore's workers of each other: ``python -m mindllm.launch.scheduler``, started by the launcher."""

from mindspore.communication import init

if __name__ == "__main__":
    init()  # with MS_ROLE=MS_SCHED it returns when all workers have ended
