"""The public functions of mindllm, which commands and notebooks call: documented in docs/python.md, and stable.

Each takes a run (a ``RunConfig``, or any source of :func:`load_config`) and options with the defaults of the command of its name,
validated against its signature (:mod:`mindllm.arguments`). It returns a frozen result (:class:`mindllm.results.Result`):
``print`` shows the tables of the command, ``to_dict()`` returns the content of ``--json``. No function prints, draws or ends the
process. A function with ``progress`` calls it with the current work, how much is done and the total
(:class:`mindllm.terminal.progress.Progress`).

Functions import what they need, so that ``import mindllm`` takes milliseconds; MindSpore is imported to compile or train only.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from mindllm.arguments import Advice, Count, Index, Memory, Overrides, Patience, Prompt, Seconds, checked
from mindllm.terminal.progress import Progress, unwatched

if TYPE_CHECKING:
    from mindllm.compiled.inspect.inspection import Inspection
    from mindllm.config import RunConfig
    from mindllm.dry_run.run import DryRun
    from mindllm.evaluate.outcome import Scores
    from mindllm.generate.outcome import Generation
    from mindllm.planning.outcome import PipelinePlan
    from mindllm.programs.step_time import ProgramStep
    from mindllm.programs.verify import ProgramOutcome
    from mindllm.prove.proof import Proof
    from mindllm.recipes.book import Book
    from mindllm.recipes.configure import Configured
    from mindllm.run.outcome import HeldOutLoss, Training
    from mindllm.strategies.constraints import Constraints
    from mindllm.strategies.outcome import Strategies
    from mindllm.timing.device import Device
    from mindllm.timing.prediction import StepPrediction
    from mindllm.verify.verification import Verification

Run = Annotated[
    "RunConfig | str | os.PathLike[str] | Mapping[str, Any]",
    Advice("pass one run: the path of its YAML, a dictionary of its keys, or the result of load_config"),
]


def argument_types() -> dict[str, type]:
    """Return the types of arguments that are imported at the first call."""
    from mindllm.config import RunConfig
    from mindllm.strategies.constraints import Constraints
    from mindllm.timing.device import Device

    return {"RunConfig": RunConfig, "Constraints": Constraints, "Device": Device}


def ignore_answer(answer: Any) -> None:
    """Do nothing with an answer of a proof."""


@checked
def load_config(source: Run, overrides: Overrides = ()) -> RunConfig:
    """Load the configuration of a run, with keys overridden.

    Args:
        source: the path of a YAML of mindllm or MindFormers; a Hugging Face directory, to train its model further; a dictionary
            of keys, with or without ``base``; or a configuration. Paths below ``configs/`` that do not exist here are those
            shipped with mindllm.
        overrides: dotted keys and their values, such as ``{"parallel_config.pipeline_stage": 8}``; or command-line options.

    Raises:
        UserError: the configuration is invalid; ``problems`` lists each mistake with file, line, key, value and fix.
    """
    from mindllm import config

    if isinstance(source, config.RunConfig):
        return config.override_config(source, overrides) if overrides else source
    return config.load_config(source, overrides)


@checked
def step_time(
    run: Run, *, device: Device | str | Path | None = None, zero_shot: bool = False, explain: bool = False
) -> StepPrediction:
    """Predict the time of a training step and its parts. Takes about a second, without MindSpore.

    Args:
        run: the run.
        device: a device description: its name or a YAML; None: the default of ``mindllm time``.
        zero_shot: use the device as it was before calibration.
        explain: also predict the gain of each single change.

    Raises:
        UserError: the run has a feature that is not modelled, or the device lacks a figure.
    """
    from mindllm.timing.prediction import predict

    return predict(load_config(run), _calibrated(device, zero_shot), explain)


@checked
def time_program(
    directory: str | Path, *, device: Device | str | Path | None = None, zero_shot: bool = False
) -> ProgramStep:
    """Predict the step time of any MindSpore program from its compiled graphs, without MindSpore.

    Args:
        directory: the output directory of ``mindllm offline``.
        device: a device description, as for :func:`step_time`.
        zero_shot: use the device as it was before calibration.

    Raises:
        UserError: ranks are missing, the pipeline is interleaved, or the device lacks a figure.
    """
    from mindllm import programs

    return programs.time_program(Path(directory), _calibrated(device, zero_shot))


@checked
def dry_run(
    run: Run,
    *,
    stages: Sequence[Index] | None = None,
    full: bool = False,
    max_device_memory: Memory | None = None,
    workers: Count | None = None,
    advice: Patience = 20.0,
    output: Path | str | None = None,
    progress: Progress = unwatched,
) -> DryRun:
    """Measure the memory of every pipeline stage by MindSpore's dry run, without a device, and check whether it fits.

    Args:
        run: the run; its device target is Ascend.
        stages: stage numbers; None: all.
        full: simulate whole stages instead of extrapolating from small ones.
        max_device_memory: the memory limit, such as ``58GB``; None: the limit of the run.
        workers: concurrent simulations; None: one per core, as memory allows.
        advice: seconds in which to search for changes that make a stage fit; 0: do not search.
        output: a directory for the log of each rank and a page of memory contents; None: write nothing.
        progress: called with the state of the simulations.

    Raises:
        UserError: a stage does not exist, the device is not Ascend, or MindSpore's compiler refuses the run.
        RunFailed: a simulation ended unexpectedly.
    """
    from dataclasses import replace

    from mindllm.dry_run.run import advise, simulate
    from mindllm.dry_run.simulations import simulations_here

    limit = {"context.max_device_memory": max_device_memory} if max_device_memory else {}
    simulations = simulations_here(workers, progress)
    result = simulate(load_config(run, limit), simulations, stages, full, with_lines=output is not None)
    if output is not None:
        result.write(Path(output))
    return replace(result, advice=advise(result, simulations, advice)) if advice else result


@checked
def verify(
    run: Run,
    *,
    steps: Count = 2,
    real_dtype: bool = False,
    mindspore_kernels: bool = False,
    workers: Count | None = None,
    most_ranks: Count | None = None,
    every_rank: bool = False,
    accumulation_steps: Count | None = None,
    cache: Path | str | None = None,
    use_cache: bool = True,
    name: str = "",
    progress: Progress = unwatched,
) -> Verification:
    """Check that all ranks of a run compute the step of a single device, and that the graphs match the YAML.

    A small model replaces the model of the run; mesh and switches are unchanged. All ranks are compiled and executed on this
    machine.

    Args:
        run: a run on several devices.
        steps: optimizer steps, in addition to one that overflows.
        real_dtype: compute in the dtypes of the run instead of fp32.
        mindspore_kernels: use MindSpore's CPU kernels for elementwise operators, too, instead of numpy (much slower).
        workers: ranks compiled concurrently; None: as cores and memory allow.
        most_ranks: larger meshes are checked as a smaller mesh of the same kind; None: 64.
        every_rank: compile every rank; otherwise compile a few of each stage, and derive the others where that is proved valid.
        accumulation_steps: upper bound of accumulation steps that are executed; None: 2.
        cache: a directory for compiled graphs; None: ``~/.cache/mindllm/graphs``.
        use_cache: whether to cache graphs.
        name: name of the run in the result; empty: its file.
        progress: called with the state of compilation and execution.

    Raises:
        UserError: the run uses a single device, or does not compile.
        RunFailed: the graphs contain operators that cannot be executed here.
    """
    from mindllm.verify.verification import require_multi_device, silence_mindspore, verify_run

    config = require_multi_device(load_config(run))
    silence_mindspore()
    from mindllm.compiled.rank.compile_ranks import cache_directory
    from mindllm.reduced_runs.model import ACCUMULATION_STEPS
    from mindllm.verify.outcome import MOST_RANKS, Options

    options = Options(
        steps,
        real_dtype,
        mindspore_kernels,
        workers,
        (Path(cache) if cache else cache_directory()) if use_cache else None,
        most_ranks or MOST_RANKS,
        every_rank=every_rank,
        accumulation_steps=accumulation_steps or ACCUMULATION_STEPS,
    )
    return verify_run(config, options, name or _name(run, config), progress)


@checked
def verify_program(directory: str | Path, *, single: str | Path | None = None, steps: Count = 2) -> ProgramOutcome:
    """Check that all ranks of any MindSpore program agree with each other and with the program on a single device.

    Args:
        directory: the output directory of ``mindllm offline --ranks all``.
        single: the output directory of the same program on one device; None: the one within ``directory``, if it exists.
        steps: training steps to execute.

    Raises:
        UserError: ranks are missing, or were saved in a form that cannot be executed.
        RunFailed: the graphs contain operators that cannot be executed here.
        CheckFailed: ranks wait for each other.
    """
    from mindllm.verify.verification import silence_mindspore

    silence_mindspore()
    from mindllm import programs

    return programs.verify_program(Path(directory), None if single is None else Path(single), steps)


@checked
def plan(
    run: Run,
    *,
    max_memory: Memory | None = None,
    interleave: Sequence[Count] | None = None,
    device: Device | str | Path | None = None,
    formula: bool | None = None,
    swap: bool = False,
    validate: bool = True,
    seconds: Seconds = 60.0,
    progress: Progress = unwatched,
) -> PipelinePlan:
    """Plan stages, chunks and recomputation: the fastest plan that fits the memory, and a lower bound for all plans.

    Args:
        run: a run with a pipeline.
        max_memory: memory limit of every stage, such as ``58GB``; None: the limit of the run.
        interleave: chunk counts per stage, of which the fastest is chosen; None: the count of the run.
        device: a device description, as for :func:`step_time`.
        formula: deprecated, without effect: costs are always estimated from the architecture.
        swap: also choose layers whose attention is swapped to the host; in 1F1B with one chunk.
        validate: check the plan of an Ascend run by a dry run, and correct it until it fits.
        seconds: approximate time limit of each plan.
        progress: called with the state of the simulations.

    Raises:
        CheckFailed: no plan fits the memory.
        UserError: the run has no pipeline or a feature that is not planned, or the time limit was too short.
    """
    from mindllm.planning import subject
    from mindllm.planning.outcome import make_plan

    config, described = load_config(run), read_device(device)
    if formula is not None:
        warnings.warn("plan(formula=...) has no effect: costs are always estimated", DeprecationWarning, stacklevel=3)
    dry_runs = None
    if validate and config.context.device_target == "Ascend":
        from mindllm.dry_run.simulations import simulations_here

        dry_runs = simulations_here(progress=progress)
    return make_plan(subject.from_run(config, described, interleave, max_memory, swap, dry_runs), seconds, validate)


@checked
def plan_problem(
    problem: Mapping[str, Any] | str | Path,
    *,
    schedule: str | None = None,
    max_memory: Memory | None = None,
    interleave: Sequence[Count] | None = None,
    seconds: Seconds = 60.0,
) -> PipelinePlan:
    """Plan layers with given costs.

    Args:
        problem: stages, micro-batches, layers and their costs, in the format of docs/pipeline_balance.md, or a file of it.
        schedule: replaces the schedule of the problem.
        max_memory: memory limit of every stage, such as ``58GB``; None: the limit of the problem.
        interleave: chunk counts per stage, of which the fastest is chosen; None: the count of the problem.
        seconds: approximate time limit of each plan.

    Raises:
        CheckFailed: no plan fits the memory.
        UserError: the file does not exist, a value is invalid, or the time limit was too short.
    """
    from mindllm.planning import subject
    from mindllm.planning.outcome import make_plan
    from mindllm.planning.read_problem import Setting
    from mindllm.units import device_mebibytes

    limit = device_mebibytes(max_memory) if max_memory else None
    numbers: Sequence[int | None] = tuple(dict.fromkeys(interleave)) if interleave else (None,)
    settings = [Setting(None, chunks, None, schedule, limit) for chunks in numbers]
    if isinstance(problem, Mapping):
        return make_plan(subject.from_fields(problem, settings), seconds)
    return make_plan(subject.from_file(Path(problem), settings), seconds)


@checked
def search(
    run: Run,
    *,
    devices: Count | None = None,
    global_batch: Count | None = None,
    device: Device | str | Path | None = None,
    best: Count = 5,
    seconds: Seconds = 5.0,
    dry_run: Count | None = None,
    schedules: Sequence[str] = (),
    dispatch: Sequence[str] = (),
    output: Path | str | None = None,
    progress: Progress = unwatched,
) -> Strategies:
    """Rank the parallel strategies of a run on a number of devices, fastest first, next to the strategy of the YAML.

    Args:
        run: the run.
        devices: number of devices; None: that of the run.
        global_batch: sequences per step; None: that of the run.
        device: a device description, as for :func:`step_time`.
        best: how many strategies to plan and show.
        seconds: time limit of each plan.
        dry_run: how many of the best to check by MindSpore's dry run, and to plan again if they do not fit.
        schedules: micro-batch schedules out of ``1f1b``, ``zero_bubble_v``, ``seqpipe``, ``seqvpp`` and ``seqsmartvpp``; the
            last three also with sequences in pieces; empty: ``1f1b`` and the schedule of the run.
        dispatch: expert dispatch out of ``alltoall``, ``allgather`` and ``places``; empty: those that compute the same as the
            run.
        output: a directory that saves evaluated strategies, so that an interrupted search continues; None: write nothing.
        progress: called with the state of the search.

    Raises:
        CheckFailed: no strategy fits.
        UserError: the run has a feature that is not modelled.
    """
    from mindllm.strategies.constraints import Constraints
    from mindllm.strategies.outcome import Wanted, find_strategies

    directory = Path(output) if output is not None else None
    if directory:
        directory.mkdir(parents=True, exist_ok=True)
    limits = Constraints(dispatch=tuple(dispatch))
    request = Wanted(devices, global_batch, best, seconds, dry_run, limits, tuple(schedules))
    return find_strategies(load_config(run), read_device(device), request, directory, progress)


@checked
def prove(
    run: Run,
    *,
    quick: bool = False,
    allow: str | Sequence[str] = (),
    search: bool = False,
    every_rank: bool = False,
    device: str | Path | None = None,
    again: bool = False,
    advice: Patience = 20.0,
    output: Path | str | None = None,
    workers: Count | None = None,
    name: str = "",
    on_answer: Callable[[Any], None] = ignore_answer,
    progress: Progress = unwatched,
) -> Proof:
    """Answer ten questions about a run: each is proved, refuted or not proved, and together they give one verdict.

    Ctrl-C ends the work and returns the answers so far: a proof that is not ``complete``. A run finds its complete proof when it
    starts.

    Args:
        run: the run. An invalid run raises; the command calls it refuted.
        quick: return analytical estimates only, within a second.
        allow: names of questions that may stay without a proof, such as ``["data"]``.
        search: compare with every other strategy for the same number of devices.
        every_rank: compile every rank; otherwise compile a few of each stage, and derive the others where that is proved valid.
        device: a device description for step times: its name or a YAML; None: the default of ``mindllm time``.
        again: ignore earlier proofs.
        advice: seconds in which to search for changes that make a stage fit; 0: do not search.
        output: a directory for ``report.html`` and ``proof.json``; None: write neither.
        workers: concurrent processes of one check; None: as cores and memory allow.
        name: name of the run in the proof; empty: its file.
        on_answer: called with each answer.
        progress: called with the state of each check.

    Raises:
        UserError: the run is invalid, or a question or device is unknown.
    """
    from mindllm.prove.found import remember
    from mindllm.prove.pieces import Options
    from mindllm.prove.proof import check_allowed
    from mindllm.prove.prove import prove_run
    from mindllm.prove.write import write_proof

    config, allowed = load_config(run), check_allowed([allow] if isinstance(allow, str) else allow)
    read_device(device)  # report an unknown name before any work

    def report_piece(piece: Any, what: str, done: int, total: int | None) -> None:
        progress(f"{piece.name}: {what}", done, total)

    proof = prove_run(
        config,
        Options(str(device or ""), search, advice, workers, every_rank),
        name or _name(run, config),
        quick=quick,
        allowed=allowed,
        use_kept=not again,
        answered=on_answer,
        told=report_piece,
    )
    if output is not None:
        write_proof(proof, Path(output))
    elif proof.complete:
        remember(proof)
    return proof


@checked
def configure(
    network: str | os.PathLike[str],
    devices: Count,
    *,
    fewest: bool = False,
    device: str | Path | None = None,
    global_batch: Count | None = None,
    seq_length: Count | None = None,
    memory: Memory | None = None,
    constraints: Constraints | None = None,
    data: str = "",
    overrides: Overrides = (),
    quick: bool = False,
    spares: Index = 0,
    node_devices: Count | None = None,
    output: Path | str | None = None,
    workers: Count | None = None,
    command: str = "",
    on_answer: Callable[[Any], None] = ignore_answer,
    progress: Progress = unwatched,
) -> Configured | Book:
    """Find the fastest strategy of a network on a number of devices, plan it, and prove it; no YAML is needed.

    With ``spares`` it returns the run with its layouts for fewer nodes, whose ``write`` writes all of them and their plan book.

    Args:
        network: the name of a shipped network, a Hugging Face directory, a ``config.json``, or a YAML.
        devices: number of devices.
        fewest: use the fewest devices, at most ``devices``, that reach the speed of ``constraints``.
        device: a device description: its name or a YAML; None: the default of ``mindllm time``.
        global_batch: sequences per step; None: that of the network, or 512.
        seq_length: tokens per sequence; None: that of the network, at most 4,096.
        memory: memory limit of a device, such as ``58GB``; None: nine tenths of its memory.
        constraints: limits of the search: a ``mindllm.strategies.constraints.Constraints``.
        data: prefix of an indexed corpus; without one, the question of the data may stay open.
        overrides: as for :func:`load_config`.
        quick: search by formula only, in seconds; nothing is simulated or proved.
        spares: number of layouts for one, two, ... nodes fewer with the same global batch; 0: none.
        node_devices: devices of a node, for ``spares``; None: as the links of the device imply.
        output: the YAML to write, next to the directory of its proof; or a directory, for ``NETWORK_Np.yaml`` in it; None:
            write nothing.
        workers: concurrent processes of one check; None: as cores and memory allow.
        command: the command that is recorded in the YAML; empty: this call.
        on_answer: called with each answer of a proof.
        progress: called with the state of search and proof.

    Raises:
        CheckFailed: no strategy fits, or none is fast enough.
        UserError: the network is unknown, or has a feature that is not modelled.
    """
    from mindllm.recipes.book import configure_with_spares
    from mindllm.recipes.configure import Request
    from mindllm.recipes.network import find_network
    from mindllm.strategies.constraints import UNLIMITED

    request = Request(
        find_network(os.fspath(network)),
        read_device(device),
        devices,
        global_batch,
        seq_length,
        memory,
        constraints or UNLIMITED,
        fewer=fewest,
        data=data,
        overrides=overrides,
    )

    def prove_layout(config: RunConfig, name: str, directory: Path | None) -> Proof:
        return prove(
            config,
            allow=() if data else ("data",),  # without a corpus, the question of the data may stay open
            device=device,
            workers=workers,
            output=directory,
            name=name,
            on_answer=on_answer,
            progress=progress,
        )

    return configure_with_spares(
        request,
        command or f"mindllm.configure({os.fspath(network)!r}, {devices})",
        spares,
        node_devices,
        Path(output) if output is not None else None,
        None if quick else prove_layout,
        progress,
    )


@checked
def inspect(run: Run, *, rank: Index = 0, name: str = "", progress: Progress = unwatched) -> Inspection:
    """Read the compiled graph of one rank: compile it from a run, without a device, or load it from a file.

    The result prints operators, FLOPs, bytes and parameters by module; its methods answer further questions: ``communication()``,
    ``redundant()``, ``recomputation()``, ``differences(other)``, ``show(scope)``.

    Args:
        run: a run; or the path of a saved graph, of MindIR, of a text ``.ir``, or of the directory of one.
        rank: the global rank to compile.
        name: name of the run in the result; empty: its file.
        progress: called when it is compiled.

    Raises:
        UserError: the run does not compile, or the file is not a graph.
    """
    from mindllm.compiled.inspect.inspection import Inspection
    from mindllm.compiled.inspect.source import compile_run, read_graph
    from mindllm.config import is_hugging_face

    if isinstance(run, str | os.PathLike):
        path = Path(run)
        if path.suffix not in (".yaml", ".yml") and not is_hugging_face(path):
            return Inspection(read_graph(path))
    config = load_config(run)
    return Inspection(compile_run(config, rank, name or _name(run, config), progress))


@checked
def train(run: Run, *, progress: Progress = unwatched) -> Training:
    """Train, or fine-tune if ``run_mode`` is finetune, and return the losses and the last checkpoint.

    Training runs in a child process, since MindSpore supports one device and one context per process; a program may train
    repeatedly. Ctrl-C stops it after a step, with a checkpoint. A CPU run on several devices executes them together; several
    Ascend devices require the launcher, as the error explains.

    Args:
        run: the run. Results of another run in its ``output_dir`` are preserved: ``load_config(run, {"resume_training": True})``
            continues it, ``{"overwrite": True}`` starts again.
        progress: called after each step.

    Raises:
        UserError: the configuration cannot be trained, or the output directory holds another run.
        RunFailed: training failed.
    """
    from mindllm.run.outcome import train_in_child

    config = load_config(run)
    if config.run_mode not in ("train", "finetune"):
        config = load_config(config, {"run_mode": "train"})
    return train_in_child(config, progress)


@checked
def generate(
    run: Run,
    prompts: str | Sequence[Prompt],
    *,
    load_checkpoint: str | Path | None = None,
    seed: Index | None = None,
    **options: Any,
) -> Generation:
    """Continue prompts with a trained model, in a child process.

    Args:
        run: a run, or a Hugging Face directory, which is executed on the CPU.
        prompts: a text; or several, each a text or a conversation (a list of messages with ``role`` and ``content``).
        load_checkpoint: the weights; None: those of the run.
        seed: seed of sampling; None: that of the run.
        options: keys of the section ``generation``, such as ``max_new_tokens=32`` or ``do_sample=True``.

    Raises:
        UserError: weights or tokenizer are missing, an option is unknown, or a prompt cannot be continued.
    """
    from mindllm.config import is_hugging_face
    from mindllm.generate.outcome import generate_in_child

    if isinstance(run, str | os.PathLike) and is_hugging_face(Path(run)):
        run = {"load_checkpoint": os.fspath(run), "use_parallel": False, "context": {"device_target": "CPU"}}
    changes: dict[str, Any] = {"run_mode": "predict", "input_data": "", **_weights(load_checkpoint)}
    changes |= {} if seed is None else {"seed": seed}
    changes |= {f"generation.{name}": value for name, value in options.items()}
    return generate_in_child(load_config(run, changes), [prompts] if isinstance(prompts, str) else prompts)


@checked
def evaluate(
    run: Run,
    *,
    tasks: str | Sequence[str] = (),
    load_checkpoint: str | Path | None = None,
    output: Path | str = "output_evaluate",
    **options: Any,
) -> HeldOutLoss | Scores:
    """Evaluate a checkpoint on held-out text, or on public tasks, in a child process.

    Args:
        run: a run; or, with ``tasks``, a Hugging Face directory or a checkpoint.
        tasks: one or several tasks or task groups of lm-evaluation-harness; none: the loss on the held-out text of the run.
        load_checkpoint: the weights of a run; None: those in its configuration.
        output: the directory for results of a model directory; results of a run are written below its ``output_dir``.
        options: options of tasks, such as ``limit=100`` or ``num_fewshot=5``: keys of the section ``evaluation``.

    Raises:
        UserError: weights are missing, or a task or option is unknown.
        RunFailed: a task failed.
    """
    tasks = [tasks] if isinstance(tasks, str) and tasks else tasks
    if isinstance(run, str | os.PathLike) and tasks and Path(run).is_dir():
        from mindllm.evaluate.outcome import evaluate_model

        return evaluate_model(Path(run), tasks, Path(output), options)
    changes = {f"evaluation.{name}": value for name, value in options.items()}
    config = load_config(run, {"run_mode": "eval", **_weights(load_checkpoint), **changes})
    if tasks:
        from mindllm.evaluate.outcome import evaluate_run

        return evaluate_run(config, tasks)
    from mindllm.run.outcome import evaluate_in_child

    return evaluate_in_child(config)


def read_device(device: Device | str | Path | None) -> Device:
    """Return a device, from a name or the path of a YAML; None: the default of ``mindllm time``."""
    from mindllm.timing import device as devices

    return device if isinstance(device, devices.Device) else devices.read_device(str(device or devices.DEFAULT))


def _calibrated(device: Device | str | Path | None, zero_shot: bool) -> Device:
    """Return a device, without its calibration if ``zero_shot``."""
    from mindllm.timing.measured.calibrate import uncalibrated

    return uncalibrated(read_device(device)) if zero_shot else read_device(device)


def _name(run: Run, config: RunConfig) -> str:
    """Return the name of a run in results: its file, the name of its model, or ``run``."""
    if isinstance(run, str | os.PathLike):
        return os.fspath(run)
    return str(config.source or config.trainer.model_name or "run")


def _weights(path: str | Path | None) -> dict[str, str]:
    return {} if path is None else {"load_checkpoint": str(path)}
