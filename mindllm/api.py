"""The public functions of mindllm, which commands and notebooks call: documented in docs/python.md, and stable.

Each takes a run (a ``RunConfig``, or what :func:`load_config` takes) and options with the defaults of the command of its name,
all of them held against its signature (:mod:`mindllm.arguments`). It returns a frozen result (:class:`mindllm.results.Result`):
``print`` shows the tables of the command, ``to_dict()`` gives what ``--json`` prints. None of them prints, draws or ends the
process. Where one takes ``progress``, it is called with what is being done, how many are done, and of how many
(:class:`mindllm.terminal.progress.Progress`).

Imports stand in the functions, so that ``import mindllm`` takes milliseconds; MindSpore is imported to compile or train alone.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from mindllm.arguments import Advice, Count, Index, Memory, Overrides, Patience, Seconds, checked
from mindllm.errors import Problem, UserError
from mindllm.terminal.progress import Progress, unwatched

if TYPE_CHECKING:
    from mindllm.compiled.inspect.inspection import Inspection
    from mindllm.config import RunConfig
    from mindllm.dry_run.run import DryRun
    from mindllm.planning.outcome import PipelinePlan
    from mindllm.prove.proof import Proof
    from mindllm.recipes.book import Book
    from mindllm.recipes.configure import Configured, Request
    from mindllm.strategies.constraints import Constraints
    from mindllm.strategies.outcome import Strategies
    from mindllm.timing.device import Device
    from mindllm.timing.prediction import StepPrediction
    from mindllm.verify.verification import Verification

Run = Annotated[
    "RunConfig | str | os.PathLike[str] | Mapping[str, Any]",
    Advice("give one run: the path of its YAML, a dictionary of its keys, or what load_config has returned"),
]


@checked
def load_config(source: Run, overrides: Overrides = ()) -> RunConfig:
    """Read the configuration of a run, and change keys of it.

    Args:
        source: the path of a YAML, mindllm's or MindFormers'; a Hugging Face directory, whose model is trained further; a
            dictionary as a YAML has it, with a ``base`` or without; or a configuration. Paths below ``configs/`` are those
            that come with mindllm where there is no such file here.
        overrides: dotted keys and their values, as ``{"parallel_config.pipeline_stage": 8}``; or options as on a command line.

    Raises:
        UserError: something is wrong; ``problems`` has every mistake with its file, line, key, value and advice.
    """
    from mindllm import config

    if isinstance(source, config.RunConfig):
        return config.override_config(source, overrides) if overrides else source
    return config.load_config(source, overrides)


@checked
def step_time(
    run: Run, *, device: Device | str | Path | None = None, zero_shot: bool = False, explain: bool = False
) -> StepPrediction:
    """Predict how long a training step takes, and where the time goes. No MindSpore; about a second.

    Args:
        run: the run.
        device: a described device: its name, a YAML, or None for the default of ``mindllm time``.
        zero_shot: the device as it was before it was calibrated.
        explain: also predict what one change alone would bring.

    Raises:
        UserError: the run has something that is not modelled, or the device lacks a figure that it needs.
    """
    from mindllm.timing.measured.calibrate import uncalibrated
    from mindllm.timing.prediction import predict

    known = described(device)
    return predict(load_config(run), uncalibrated(known) if zero_shot else known, explain)


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
    """Find what fills the memory of every pipeline stage by MindSpore's own dry run, without a device, and whether it fits.

    Args:
        run: the run; its device target is Ascend.
        stages: numbers of the stages; None: all.
        full: simulate whole stages in place of extrapolating small ones.
        max_device_memory: the limit, as ``58GB``; None: the run's.
        workers: simulations at once; None: one per core, as memory allows.
        advice: where a stage does not fit, changes that would help are tried, none begun after so many seconds; 0: none.
        output: a directory for a log of each rank and a page of what fills the memory; None: nothing is written.
        progress: told of simulations.

    Raises:
        UserError: no such stage, another device than Ascend, or what MindSpore's compiler refuses.
        RunFailed: a simulation ended unexpectedly.
    """
    from dataclasses import replace

    from mindllm.dry_run.run import advise, simulate
    from mindllm.dry_run.simulations import simulations_here

    limit = {"context.max_device_memory": max_device_memory} if max_device_memory else {}
    simulations = simulations_here(workers, progress)
    found = simulate(load_config(run, limit), simulations, stages, full, with_lines=output is not None)
    if output is not None:
        found.write(Path(output))
    return replace(found, advice=advise(found, simulations, advice)) if advice else found


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
    progress: Progress = unwatched,
) -> Verification:
    """Show whether all ranks of a run together compute the step of a single device, and the graphs are what the YAML asks for.

    A small model stands in for the run's; its mesh and every switch are kept. All ranks are compiled and executed here.

    Args:
        run: a run on several devices.
        steps: optimizer steps, besides one that overflows.
        real_dtype: compute in the run's dtypes in place of fp32.
        mindspore_kernels: MindSpore's CPU kernels for elementary operators too, which are numpy otherwise (far slower).
        workers: ranks compiled at a time; None: by cores and memory.
        most_ranks: a mesh of more ranks is checked as a smaller one of its kind; None: 64.
        every_rank: compile every rank; otherwise a few of each stage, and others are derived where that is shown to be right.
        accumulation_steps: of more so many are executed; None: 2.
        cache: a directory for compiled graphs; None: ``~/.cache/mindllm/graphs``.
        use_cache: whether graphs are kept at all.
        progress: told of ranks that are compiled, and of what follows.

    Raises:
        UserError: the run describes one device, or does not compile.
        RunFailed: it holds operators that cannot be executed here.
    """
    from mindllm.verify.verification import require_multi_device, silence_mindspore, verify_run

    config = require_multi_device(load_config(run))
    silence_mindspore()
    from mindllm.compiled.rank.compile_ranks import cache_directory
    from mindllm.reduced_runs.model import ACCUMULATION_STEPS
    from mindllm.verify.verification import MOST_RANKS, Options

    directory = (Path(cache) if cache else cache_directory()) if use_cache else None
    how = Options(
        steps,
        real_dtype,
        mindspore_kernels,
        workers,
        directory,
        most_ranks or MOST_RANKS,
        every_rank=every_rank,
        accumulation_steps=accumulation_steps or ACCUMULATION_STEPS,
    )
    return verify_run(config, how, _name(run, config), progress)


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
    """Plan stages, chunks and recomputation: the fastest plan that fits the memory, and a bound no plan can beat.

    Args:
        run: a run with a pipeline.
        max_memory: of every stage, as ``58GB``; None: the run's.
        interleave: numbers of chunks per stage, of which the fastest is taken; None: the run's.
        device: a described device, as of :func:`step_time`.
        formula: deprecated, has no effect: costs always come from the architecture.
        swap: choose also whose attention waits on the host; in 1F1B with one chunk.
        validate: dry-run the plan of an Ascend run, and correct it until confirmed.
        seconds: for each plan, about.
        progress: told of simulations.

    Raises:
        CheckFailed: no plan fits the memory.
        UserError: the run has no pipeline, or has something that is not planned; or no plan was found in that time.
    """
    from mindllm.planning import subject
    from mindllm.planning.outcome import make_plan

    config, known = load_config(run), described(device)
    if formula is not None:
        warnings.warn(
            "plan(formula=...) has no effect: costs always come from formulas", DeprecationWarning, stacklevel=3
        )
    dry_runs = None
    if validate and config.context.device_target == "Ascend":
        from mindllm.dry_run.simulations import simulations_here

        dry_runs = simulations_here(progress=progress)
    return make_plan(subject.from_run(config, known, interleave, max_memory, swap, dry_runs), seconds, validate)


@checked
def plan_problem(
    problem: Mapping[str, Any] | str | Path,
    *,
    schedule: str | None = None,
    max_memory: Memory | None = None,
    interleave: Sequence[Count] | None = None,
    seconds: Seconds = 60.0,
) -> PipelinePlan:
    """Plan layers whose costs are given.

    Args:
        problem: stages, micro-batches, layers and their costs, as docs/pipeline_balance.md has them, or a file of that.
        schedule: replaces that of the problem.
        max_memory: of every stage, as ``58GB``; None: the problem's.
        interleave: numbers of chunks per stage, of which the fastest is taken; None: the problem's.
        seconds: for each plan, about.

    Raises:
        CheckFailed: no plan fits the memory.
        UserError: no such file, a value that makes no sense, or no plan was found in that time.
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
    """Find the strategies of a run on a number of devices, the fastest first, beside the YAML as it is.

    Args:
        run: the run.
        devices: how many devices; None: the run's.
        global_batch: sequences of a step; None: the run's.
        device: a described device, as of :func:`step_time`.
        best: how many are planned and shown.
        seconds: for each plan.
        dry_run: how many of the best are held to MindSpore's dry run, and planned again where they do not fit.
        schedules: orders of micro-batches, of ``1f1b``, ``zero_bubble_v``, ``seqpipe``, ``seqvpp`` and ``seqsmartvpp``, the
            last three also with sequences in pieces; empty: the first, and what the run has.
        dispatch: how tokens reach their experts, of ``alltoall``, ``allgather`` and ``places``; empty: what computes the same as
            the run.
        output: a directory in which what was judged is kept, so that an interrupted search goes on; None: nothing is written.
        progress: told of strategies that are judged, planned and simulated.

    Raises:
        CheckFailed: nothing fits.
        UserError: the run has something that is not modelled.
    """
    from mindllm.strategies.constraints import Constraints
    from mindllm.strategies.outcome import Wanted, find_strategies

    directory = Path(output) if output is not None else None
    if directory:
        directory.mkdir(parents=True, exist_ok=True)
    limits = Constraints(dispatch=tuple(dispatch))
    wanted = Wanted(devices, global_batch, best, seconds, dry_run, limits, tuple(schedules))
    return find_strategies(load_config(run), described(device), wanted, directory, progress)


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
    output: Path | str | None = None,
    workers: Count | None = None,
    progress: Progress = unwatched,
) -> Proof:
    """Answer the ten questions about a run: each is proved, refuted or not proved, and one verdict comes of them.

    Ctrl-C ends the work and returns what is known: a proof that is not ``complete``. A run finds a complete one when it starts.

    Args:
        run: the run. One that does not load raises, where the command calls it refuted.
        quick: stop after what formulas expect, which takes a second.
        allow: names of questions that may stay without a proof, as ``["data"]``.
        search: hold the strategy against all others on as many devices.
        every_rank: compile every rank; otherwise a few of each stage, and others are derived where that is shown to be right.
        device: a described device that steps are timed on: its name or a YAML; None: the default of ``mindllm time``.
        again: prove also what has not changed since an earlier proof.
        output: a directory for ``report.html`` and ``proof.json``; None: neither is written.
        workers: processes at once in a piece of the work; None: by cores and memory.
        progress: told of the pieces and what they do.

    Raises:
        UserError: the run does not load, or there is no such question or device.
    """
    from mindllm.prove.found import remember
    from mindllm.prove.pieces import Options
    from mindllm.prove.proof import check_allowed
    from mindllm.prove.prove import prove_run
    from mindllm.prove.write import write_proof

    config, allowed = load_config(run), check_allowed([allow] if isinstance(allow, str) else allow)
    options = Options(str(device or ""), search, workers=workers, every_rank=every_rank)
    described(device)  # a name that is none is told at once

    def told(piece: Any, what: str, done: int, total: int | None) -> None:
        progress(f"{piece.name}: {what}", done, total)

    name = _name(run, config)
    proof = prove_run(config, options, name, quick=quick, allowed=allowed, use_kept=not again, told=told)
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
    progress: Progress = unwatched,
) -> Configured | Book:
    """Find the fastest strategy of a network on a number of devices, plan it, and prove it: a run without a YAML.

    With ``spares`` it returns the run with its layouts for fewer nodes, whose ``write`` writes all of them and their book.

    Args:
        network: the name of a shipped network, Hugging Face directory, ``config.json``, or a YAML.
        devices: how many devices.
        device: a described device: its name or a YAML; None: the default of ``mindllm time``.
        global_batch: sequences of a step; None: the network's own, or 512.
        seq_length: tokens of a sequence; None: the network's own, at most 4,096.
        memory: of a device, as ``58GB``; None: nine tenths of what it has.
        constraints: what is not wanted: a ``mindllm.strategies.constraints.Constraints``.
        data: prefix of an indexed corpus; without one the question of the data may stay open.
        overrides: as of :func:`load_config`.
        quick: all is by formula, which takes seconds; nothing is simulated or proved.
        spares: layouts for up to so many nodes fewer, with the same global batch; 0: none.
        node_devices: devices of a node, for ``spares``; None: as the device's links say.
        progress: told of what is tried.

    Raises:
        CheckFailed: nothing fits, or nothing is as fast as was wanted.
        UserError: no such network, or it has something that is not modelled.
    """
    from mindllm.recipes.book import Book, devices_of_node, find_spares, spare_counts
    from mindllm.recipes.configure import Request
    from mindllm.recipes.network import find_network
    from mindllm.strategies.constraints import UNLIMITED

    request = Request(
        find_network(os.fspath(network)),
        described(device),
        devices,
        global_batch,
        seq_length,
        memory,
        constraints or UNLIMITED,
        data=data,
        overrides=overrides,
    )
    if node_devices and not spares:
        message = f"is said of spares (value {node_devices}); give spares=1 too, or leave it out"
        raise UserError.of(Problem(None, ("node_devices",), message, node_devices))
    node = devices_of_node(request.device, node_devices) if spares else 0
    counts = spare_counts(devices, node, spares) if spares else ()
    command = f"mindllm.configure({os.fspath(network)!r}, {devices})"

    def find(asked: Request, number: int = 0) -> Configured:
        return _found(asked, command, device, quick, progress)

    run = find(request)
    return Book(run, node, tuple(find_spares(request, run, counts, find))) if counts else run


def _found(request: Request, command: str, device: str | Path | None, quick: bool, progress: Progress) -> Configured:
    """Return the run that is asked for, proved unless ``quick``; without data that question may stay open."""
    from mindllm.recipes.configure import find_run, prove_found

    found = find_run(request, command, progress=progress)
    if quick:
        return found
    again = partial(find_run, request, command, dry_run=1, progress=progress)
    allowed = () if request.data else ("data",)
    return prove_found(found, again, lambda config: prove(config, allow=allowed, device=device, progress=progress))


@checked
def inspect(run: Run, *, rank: Index = 0, progress: Progress = unwatched) -> Inspection:
    """Look into the compiled graph of one rank: compiled on the spot from a run, without a device, or read from a file.

    The result prints operators, FLOPs, bytes and parameters by module; its methods answer further questions: ``communication()``,
    ``redundant()``, ``recomputation()``, ``differences(other)``, ``show(scope)``.

    Args:
        run: a run; or the path of a kept graph, of MindIR, of a text ``.ir``, or of the directory of one.
        rank: the global rank that is compiled.
        progress: told when it is compiled.

    Raises:
        UserError: the run cannot be compiled, or the file is no graph.
    """
    from mindllm.compiled.inspect.inspection import Inspection
    from mindllm.compiled.inspect.source import compile_run, read_graph

    if isinstance(run, str | os.PathLike) and _is_graph(Path(run)):
        return Inspection(read_graph(Path(run)))
    config = load_config(run)
    return Inspection(compile_run(config, rank, _name(run, config), progress))


def _is_graph(path: Path) -> bool:
    """Whether a path is no run: neither a YAML nor a Hugging Face directory."""
    from mindllm.config import is_hugging_face

    return path.suffix not in (".yaml", ".yml") and not is_hugging_face(path)


def _name(run: Run, config: RunConfig) -> str:
    """What results call a run: its file, the name of its model, or ``run``."""
    if isinstance(run, str | os.PathLike):
        return os.fspath(run)
    return str(config.source or config.trainer.model_name or "run")


def described(device: Device | str | Path | None) -> Device:
    """Return a device, of a name or the path of a YAML; None: the default of ``mindllm time``."""
    from mindllm.timing.device import DEFAULT, Device, read_device

    return device if isinstance(device, Device) else read_device(str(device or DEFAULT))
