"""The beginning of a run that trains or evaluates: what executes it, and what its process needs before MindSpore is loaded."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

from mindllm.config import RunConfig, override_config
from mindllm.errors import RunFailed
from mindllm.launch.heartbeat import heart, is_watched
from mindllm.launch.meeting import RendezvousClient
from mindllm.process.end_in_time import ending_in_time
from mindllm.process.exit_hooks import skip_exit_functions
from mindllm.run.outcome import Ended
from mindllm.run.proved import NOTHING_FOUND, Found, find
from mindllm.terminal.progress import Progress, unwatched
from mindllm.train.device import prepare_environment
from mindllm.train.job.execution import Execution, Executor, execution_of


def start(
    config: RunConfig, progress: Progress = unwatched, told: Callable[[Ended], None] = lambda ended: None
) -> Ended:
    """Runs ``run_mode`` on whatever executes it; ``told`` is given what it came to, also where something failed meanwhile.

    Raises:
        RunFailed: something failed meanwhile.
        UserError: the run cannot be executed by what was started, or is too large for this machine.
        CheckFailed: it requires a proof, and has none.
    """
    if RendezvousClient.is_inherited():
        # MindSpore's connections to other processes crash now and then (2.10) in its exit function, which clears its resources.
        skip_exit_functions()
    with ending_in_time(told=heart.end) if is_watched() else nullcontext():
        ended = _run(config, progress)
        told(ended)
        if ended.failures:
            raise RunFailed("\n".join(ended.failures))
        return ended


def _run(config: RunConfig, progress: Progress) -> Ended:
    execution = execution_of(config)
    proved = proof_of(config, execution)
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

    if config.run_mode == "eval":
        return evaluate(config, execution, progress)
    return train(config, execution, progress, proved)


def proof_of(config: RunConfig, execution: Execution) -> Found:
    """Look for the proof of a run that trains, by its first rank alone: the others may not see the files that it sees.

    Raises:
        CheckFailed: ``require_proof`` is true, and there is none that says ready.
    """
    trains = config.run_mode in ("train", "finetune") and not execution.ranks.simulated
    return find(config) if trains and execution.ranks.is_first else NOTHING_FOUND
