"""Runs inside a program of somebody else, as ``sitecustomize``, when that is to train in MindSpore's dry run.

``environment.py`` writes this file where the program's Python finds it, so only the standard library is imported, and
MindSpore once the program itself has. It leaves the program's files alone. It answers what only a machine with devices could,
ends the program when one training step has been simulated, and reports what the tool must know: the memory the program grants
itself, stages, whether it has trained, and how it ended.

Asked to, it has the program train on one device: nothing is cut, nothing is sunk into a graph, and the step is given the batch
that all devices together are.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

REPORT, STEPS, GRAPHS, STAND_INS = "MINDLLM_PROGRAM_REPORT", "MINDLLM_STEPS", "MINDLLM_GRAPHS", "MINDLLM_STAND_INS"
SINGLE = "MINDLLM_SINGLE"  # shapes of the whole batch, as JSON; set where the program is to train on one device
SMALL = 1 << 16  # elements of what is filled all the same: counters, rates and decays, which are read
MORE_THAN_ANY = 4000.0  # GB, so that a program that does not fit is measured, too
ANSWERED = {"hccl": {}, "hccl.sys_version": {"__sys_version__": "8.5"}}  # not te: who finds it wants its compiler
BACKWARD = b"Gradients/"
GRAPH_MODE, KIB = 0, 1024
MIND_IR, PARAMETERS = "training.mindir", "parameters.json"
MANAGER = "lib/plugin/ascend/libmindspore_ascend_res_manager.so"
POLLED = (
    "_ZN9mindspore6device6ascend19aclrtProcessReport_E"  # as compiled/device/callback_thread.py does for mindllm's runs
)
POLLS = "_ZN9mindspore6device6ascend27SimuFuncIaclrtProcessReportIiEET_i"

_process = os.getpid()
_report_path = os.environ.pop(REPORT, "")  # so that Python programs this one starts do not report
_steps = int(os.environ.get(STEPS, "0"))  # 0: as many as the program wants
_report: dict[str, Any] = {"mindspore": None, "mode": None, "limit": None, "trained": False, "compile_seconds": 0.0}
_executions: dict[str, int] = {}
_training: set[str] = set()
_seen: set[str] = set()
_initial: dict[str, float] = {}
_slices: dict[str, int] = {}
_executors: dict[str, Any] = {}
_cloned: dict[int, tuple[Any, float]] = {}


class _AfterImport(importlib.abc.MetaPathFinder):
    """Has :func:`_prepare` called when MindSpore has been imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Find MindSpore as Python would."""
        if name != "mindspore":
            return None
        sys.meta_path.remove(self)
        specification = importlib.util.find_spec(name)
        loader = specification and specification.loader
        if loader is None or not hasattr(loader, "exec_module"):
            return specification
        execute = loader.exec_module

        def execute_and_prepare(module: ModuleType) -> None:
            execute(module)
            _prepare(module)

        loader.exec_module = execute_and_prepare  # type: ignore[method-assign]
        return specification


class _Answers(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The Python package of CANN that programs ask for its version only; asked when nobody else has it."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """A module that holds the version."""
        if name not in ANSWERED:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=not ANSWERED[name])

    def create_module(self, spec: Any) -> None:
        """Python makes it."""

    def exec_module(self, module: ModuleType) -> None:
        """Set what is asked for."""
        vars(module).update(ANSWERED[module.__name__])


def _prepare(mindspore: ModuleType) -> None:
    """Everything that MindSpore itself must be told."""
    _report["mindspore"] = mindspore.__version__
    from mindspore.common.initializer import Initializer
    from mindspore.communication._comm_helper import GlobalComm

    GlobalComm.CHECK_ENVS = False  # the file that says which devices there are
    fill = Initializer.__call__
    Initializer.__call__ = lambda initializer, array: fill(initializer, array) if array.size <= SMALL else array
    if _report_path:  # weights nobody reads need no memory of the host
        _watch_memory()
        _watch_parameters(mindspore.Parameter)
    if os.environ.get(SINGLE):
        _stay_on_one_device(json.loads(os.environ[SINGLE]))
    _watch_graphs(Path(str(mindspore.__file__)).parent)


def _stay_on_one_device(shapes: Sequence[Sequence[int]]) -> None:
    """Drop what cuts the program, and gives its step as many rows as all devices have together.

    Rows are repeated: whoever executes the graph has values of their own for them.
    """
    import mindspore
    from mindspore import context, nn
    from mindspore.common.api import _JitExecutor
    from mindspore.ops.primitive import Primitive
    from mindspore.parallel import _utils
    from mindspore.train import amp

    if hasattr(
        amp, "_TrainGradAccuStepCell"
    ):  # the step of Model, which averages over micro-batches where there is a pipeline
        amp._is_grad_accumulation = lambda cell: _micro_batches(cell) > 1
        amp._TrainGradAccuStepCell = lambda network, optimizer: nn.TrainOneStepCell(
            network, optimizer, 1.0 / _micro_batches(network)
        )
    for module in (context, _utils):
        module._set_auto_parallel_context = lambda **asked: None
    Primitive.shard = lambda primitive, *strategies, **named: primitive
    _reduce_nothing(mindspore)
    for name in ("train", "fit"):
        setattr(mindspore.Model, name, _without_sinking(getattr(mindspore.Model, name)))
    for kind, name in ((nn.Cell, "compile_and_run"), (_JitExecutor, "__call__")):
        setattr(kind, name, _given_all_rows(getattr(kind, name), shapes))


def _reduce_nothing(mindspore: ModuleType) -> None:
    """Gradients of all micro-batches are there at once; with stages they come out of accumulators, which stay zero here."""
    from mindspore import nn, ops, parallel

    def divided(scale: Any, gradient: Any) -> Any:
        return ops.div(gradient, ops.cast(scale, gradient.dtype))

    def construct(self: Any, grads: Any) -> Any:
        return self.hyper_map(ops.partial(divided, self.scale_sense * self.degree), grads)

    for place in (nn, parallel.nn):
        if hasattr(place, "PipelineGradReducer"):
            place.PipelineGradReducer.construct = construct


def _micro_batches(network: Any) -> int:
    found = (cell.micro_size for _, cell in network.cells_and_names() if hasattr(cell, "micro_size"))
    return int(next(found, 1))


def _without_sinking(train: Any) -> Any:
    def watched(*arguments: Any, **named: Any) -> Any:
        given = inspect.signature(train).bind(*arguments, **named)
        given.arguments["dataset_sink_mode"] = False
        return train(*given.args, **given.kwargs)

    return watched


def _given_all_rows(run: Any, shapes: Sequence[Sequence[int]]) -> Any:
    def whole(value: Any, wanted: Sequence[int]) -> Any:
        if not wanted or tuple(value.shape) == tuple(wanted):
            return value
        return type(value)(value.asnumpy().repeat(wanted[0] // value.shape[0], 0))

    def fits(value: Any, wanted: Sequence[int]) -> bool:
        shape = list(getattr(value, "shape", [-1]))
        return shape == list(wanted) or bool(
            shape and wanted and shape[1:] == list(wanted[1:]) and not wanted[0] % shape[0]
        )

    def watched(self: Any, *arguments: Any, **named: Any) -> Any:
        owner = tuple(value for value in arguments[:1] if not hasattr(value, "asnumpy"))  # a method's own object
        rows = arguments[len(owner) :]
        if len(rows) == len(shapes) and all(map(fits, rows, shapes)):
            arguments = (*owner, *map(whole, rows, shapes))
        return run(self, *arguments, **named)

    return watched


def _watch_memory() -> None:
    """Note the memory the program grants itself, and grants more."""
    from mindspore import context, runtime
    from mindspore._c_expression import ms_ctx_param

    handle = context._Context
    set_param = handle.set_param

    def watched(self: Any, param: Any, value: Any) -> Any:
        if param == ms_ctx_param.max_device_memory:
            _report["limit"], value = value, MORE_THAN_ANY
        return set_param(self, param, value)

    handle.set_param = watched
    context._context().set_param(ms_ctx_param.max_device_memory, MORE_THAN_ANY)
    _report["limit"] = None
    set_memory = runtime.set_memory

    def watched_memory(*arguments: Any, **named: Any) -> Any:
        given = inspect.signature(set_memory).bind(*arguments, **named).arguments
        if "max_size" in given:
            _report["limit"] = float(str(given["max_size"]).removesuffix("GB"))
        return set_memory(**{**given, "max_size": f"{MORE_THAN_ANY:.0f}GB"})

    runtime.set_memory = watched_memory


def _watch_graphs(package: Path) -> None:
    """Time compilation, recognize a training graph when it runs, and end the program before an additional run."""
    from mindspore import _c_expression

    for name in ("GraphExecutor_", "JitExecutor_"):
        kind = getattr(_c_expression, name, None)
        if kind is not None:
            kind.compile = _timed(kind.compile, package)
            kind.__call__ = _counted(kind.__call__, lambda arguments: str(arguments[-1]))
    _watch_jit()


def _watch_jit() -> None:
    """Watch functions under ``mindspore.jit``. Another executor runs them, which receives the phase first."""
    from mindspore.common.api import _pynative_executor

    kind, current = type(_pynative_executor), [""]
    set_phase = kind.set_jit_compile_phase

    def noted(self: Any, phase: str) -> Any:
        current[0] = phase or current[0]
        return set_phase(self, phase)

    kind.set_jit_compile_phase = noted
    kind.grad_jit = _counted(kind.grad_jit, lambda arguments: str(current[0]))


def _timed(compiled: Any, package: Path) -> Any:
    def watched(*arguments: Any, **named: Any) -> Any:
        _calm_polling_thread(package)
        if _report_path:
            _note_parameters(arguments)
            _executors.update((word, arguments[0]) for word in arguments[1:] if isinstance(word, str))
        start = time.monotonic()
        try:
            return compiled(*arguments, **named)
        finally:
            _report["compile_seconds"] += time.monotonic() - start
            _note_parallel(word for word in arguments if isinstance(word, str))

    return watched


def _counted(run: Any, phase_of: Callable[[Sequence[Any]], str]) -> Any:
    def watched(*arguments: Any, **named: Any) -> Any:
        phase = phase_of(arguments)
        if _is_training(phase):
            if 0 < _steps <= _executions[phase]:
                _report["stopped"] = True
                sys.exit(0)
            _executions[phase] += 1
        result = run(*arguments, **named)
        if phase in _training and not _report["trained"]:
            _report["trained"] = True
            _keep_executable(_executors.get(phase, arguments[0]), phase)
        return result

    return watched


def _watch_parameters(kind: Any) -> None:
    """Note what parameters begin with before MindSpore fills them."""
    init_data = kind.init_data

    def noted(self: Any, *arguments: Any, **named: Any) -> Any:
        _note_parameter(self)
        return init_data(self, *arguments, **named)

    kind.init_data = noted
    clone = kind.clone

    def noted_clone(self: Any, init: Any = "same") -> Any:
        copy = clone(self, init)
        value = {"zeros": 0.0, "ones": 1.0}.get(init) if isinstance(init, str) else init
        if isinstance(value, int | float):
            _cloned[id(copy)] = (copy, float(value))
        return copy

    kind.clone = noted_clone


def _note_parameters(cells: Sequence[Any]) -> None:
    for cell in cells:
        if hasattr(cell, "parameters_and_names"):
            for _, parameter in cell.parameters_and_names():
                _note_parameter(parameter)


def _note_parameter(parameter: Any) -> None:
    """Note what a parameter begins with, where it is the same everywhere; MindSpore draws the others."""
    try:
        value = _constant(parameter)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return  # another release of MindSpore; the program must not fail by it
    if value is not None:
        _initial.setdefault(parameter.name, value)


def _constant(parameter: Any) -> float | None:
    if id(parameter) in _cloned:
        return _cloned[id(parameter)][1]
    kind = type(parameter.init_mode.init).__name__ if getattr(parameter, "has_init", False) else ""
    if kind in ("Zero", "One"):
        return float(kind == "One")
    if kind:
        return float(parameter.init_mode.init.value) if kind == "Constant" else None
    return float(parameter.asnumpy().reshape(-1)[0]) if parameter.size == 1 else None


def _keep_executable(executor: Any, phase: str) -> None:
    """Keep what the text of a graph does not say and its execution needs: constants, layouts, what parameters begin with."""
    if not _graph_files():
        return
    directory = _graph_files()[0].parent
    try:
        graph = executor.get_func_graph_proto(phase, "mind_ir")
        layouts = executor.get_parameter_layout(phase) if hasattr(executor, "get_parameter_layout") else {}
    except (AttributeError, RuntimeError, ValueError):
        return  # of another release of MindSpore
    (directory / MIND_IR).write_bytes(graph)
    for copy, value in _cloned.values():  # named after it was made; a function under jit shows nobody its parameters
        _initial.setdefault(copy.name, value)
    known = {
        "layouts": {name: list(layout) for name, layout in layouts.items()},
        "initial": _initial,
        "slices": _slices.get(phase, 0),
    }
    (directory / PARAMETERS).write_text(json.dumps(known, default=list), encoding="utf-8")


def _is_training(phase: str) -> bool:
    """Whether a graph has a backward pass, which its text says; it is written when the graph is compiled, before it is run."""
    if phase not in _executions:
        new = [path for path in _graph_files() if path.name not in _seen]
        _seen.update(path.name for path in new)
        _executions[phase] = 0
        if any(BACKWARD in path.read_bytes() for path in new):
            _training.add(phase)
    return phase in _training


def _graph_files() -> list[Path]:
    return sorted(Path(os.environ[GRAPHS]).rglob("*_validate_*.ir")) if os.environ.get(GRAPHS) else []


def _note_parallel(phases: Iterable[str]) -> None:
    """What only holds while a graph is compiled: ``AutoParallel`` forgets it afterwards."""
    from mindspore import context

    full, strategy = (context.get_auto_parallel_context(key) for key in ("full_batch", "dataset_strategy"))
    first = strategy[0] if isinstance(strategy, tuple | list) and strategy else ()
    cut = first[0] if isinstance(first, tuple | list) and first else 0
    _slices.update(dict.fromkeys(phases, 1 if full else cut if isinstance(cut, int) else 0))
    for key, name in (("stages", "pipeline_stages"), ("devices", "device_num")):
        _report[key] = max(int(context.get_auto_parallel_context(name) or 1), _report.get(key, 1))


def _calm_polling_thread(package: Path) -> None:
    """Let the thread that asks for callbacks sleep between questions, if it is the one known."""
    stand_ins = os.environ.pop(STAND_INS, "")
    if not stand_ins:
        return
    try:
        manager = ctypes.CDLL(str(package / MANAGER))
        polled = ctypes.c_void_p.in_dll(manager, POLLED)
        known = ctypes.cast(getattr(manager, POLLS), ctypes.c_void_p)
        sleeping = ctypes.cast(ctypes.CDLL(stand_ins).stand_in_wait, ctypes.c_void_p)
    except (OSError, AttributeError, ValueError):
        return
    if polled.value == known.value:
        polled.value = sleeping.value


def _note_error(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    missing = getattr(error, "name", None) if isinstance(error, ImportError) else None
    _report["error"] = {"kind": kind.__name__, "text": str(error), "missing": missing}
    _shown_before(kind, error, trace)


def _write_report() -> None:
    """Written last; a program that imports MindSpore is not overwritten by one that does not."""
    if os.getpid() != _process or (_report["mindspore"] is None and Path(_report_path).exists()):
        return
    if _report["mindspore"] is not None:
        from mindspore import context

        _report["mode"] = "graph" if context.get_context("mode") == GRAPH_MODE else "pynative"
        _report["target"] = context.get_context("device_target")
    _report["host_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB
    unfinished = Path(f"{_report_path}.{_process}")
    unfinished.write_text(json.dumps(_report), encoding="utf-8")
    unfinished.replace(_report_path)


def _run_shadowed() -> None:
    """A ``sitecustomize`` of the user's own, which this file hides, is run as well."""
    here = Path(__file__).resolve().parent
    search = [entry for entry in sys.path if Path(entry or ".").resolve() != here]
    specification = importlib.machinery.PathFinder.find_spec("sitecustomize", search)
    if specification is not None and specification.loader is not None:
        specification.loader.exec_module(importlib.util.module_from_spec(specification))


if __name__ == "sitecustomize" and os.environ.get("MS_SIMULATION_LEVEL"):
    _shown_before, sys.excepthook = sys.excepthook, _note_error
    sys.meta_path.insert(0, _AfterImport())
    sys.meta_path.append(_Answers())
    if _report_path:
        atexit.register(_write_report)
    _run_shadowed()
