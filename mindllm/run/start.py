"""The beginning of a run that trains or evaluates: what executes it, and what its process needs before MindSpore is loaded."""

from __future__ import annotations

from contextlib import nullcontext

from mindllm.config import RunConfig, override_config
from mindllm.launch.heartbeat import heart, is_watched
from mindllm.launch.meeting import RendezvousClient
from mindllm.process.end_in_time import ending_in_time
from mindllm.process.exit_hooks import skip_exit_functions
from mindllm.train.device import prepare_environment
from mindllm.train.job.execution import Executor, execution_of


def start(config: RunConfig) -> int:
    """Runs ``run_mode`` on whatever executes it; returns the exit code.

    Raises:
        UserError: the run cannot be executed by what was started, or is too large for this machine.
    """
    if RendezvousClient.is_inherited():
        # MindSpore's connections to other processes crash now and then (2.10) in its exit function, which clears its resources.
        skip_exit_functions()
    with ending_in_time(told=heart.end) if is_watched() else nullcontext():
        return _run(config)


def _run(config: RunConfig) -> int:
    execution = execution_of(config)
    if execution.ranks.simulated:
        from mindllm.compiled.simulation.simulated_process import enter_simulation, import_quietly
        from mindllm.run.simulated import with_own_files

        enter_simulation()
        import_quietly()
        config = with_own_files(config, execution.ranks.rank)
    elif execution.executor is Executor.LOCKSTEP:
        from mindllm.compiled.execute.estimate import refuse_too_large

        if config.profile:
            raise config.error("profile", "ranks executed together are not profiled (value true); write false")
        refuse_too_large(config)
        config = override_config(config, {"context.enable_graph_kernel": False, "context.compile_cache": False})
    prepare_environment(config)
    from mindllm.run.training import evaluate, train

    return (evaluate if config.run_mode == "eval" else train)(config, execution)
