"""Start of a run that trains or evaluates: choose what executes it and prepare the process before MindSpore is imported."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

from mindllm.config import RunConfig, override_config
from mindllm.errors import RunFailed
from mindllm.launch.heartbeat import heart, is_watched
from mindllm.launch.meeting import RendezvousClient
from mindllm.process.end_in_time import ending_in_time
from mindllm.process.exit_hooks import skip_exit_functions
from mindllm.run.outcome import RunOutcome
from mindllm.run.proof import NO_PROOF, ProofSummary, summarize_proof
from mindllm.terminal.progress import Progress, unwatched
from mindllm.train.device import prepare_environment
from mindllm.train.job.execution import Execution, Executor, execution_of


def start(
    config: RunConfig,
    progress: Progress = unwatched,
    on_outcome: Callable[[RunOutcome], None] = lambda outcome: None,
) -> RunOutcome:
    """Execute the ``run_mode`` of a configuration. ``on_outcome`` is called with the outcome, also if it contains failures.

    Raises:
        RunFailed: part of the run failed.
        UserError: the started processes cannot execute the run, or it is too large for this machine.
        CheckFailed: the run requires a proof and does not have one.
    """
    if RendezvousClient.is_inherited():
        # MindSpore 2.10 sometimes crashes in its exit function, which closes connections to other processes.
        skip_exit_functions()
    with ending_in_time(told=heart.end) if is_watched() else nullcontext():
        outcome = _execute(config, progress)
        on_outcome(outcome)
        if outcome.failures:
            raise RunFailed("\n".join(outcome.failures))
        return outcome


def _execute(config: RunConfig, progress: Progress) -> RunOutcome:
    execution = execution_of(config)
    proof = first_rank_proof(config, execution)
    if execution.ranks.simulated:
        from mindllm.compiled.simulation.simulated_process import enter_simulation, import_quietly

        enter_simulation()
        import_quietly()
        # A simulated rank has its own output directory, so that files of a real run stay as they are.
        directory = f"{config.output_dir}/simulated/rank_{execution.ranks.rank}"
        config = override_config(config, {"output_dir": directory})
    elif execution.executor is Executor.LOCKSTEP:
        from mindllm.compiled.execute.estimate import refuse_too_large

        if config.profile:
            raise config.error("profile", "not supported when all ranks run in one process (value true); write false")
        refuse_too_large(config)
        config = override_config(config, {"context.enable_graph_kernel": False, "context.compile_cache": False})
    prepare_environment(config)
    # These import MindSpore.
    from mindllm.run.training import evaluate, train

    if config.run_mode == "eval":
        return evaluate(config, execution, progress)
    return train(config, execution, progress, proof)


def first_rank_proof(config: RunConfig, execution: Execution) -> ProofSummary:
    """Look up the proof of a training run on its first rank; other nodes may not see the same files.

    Raises:
        CheckFailed: ``require_proof`` is true, and no proof has the verdict ready.
    """
    trains = config.run_mode in ("train", "finetune") and not execution.ranks.simulated
    return summarize_proof(config) if trains and execution.ranks.is_first else NO_PROOF
