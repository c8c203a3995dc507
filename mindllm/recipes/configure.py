"""Configures a run for a network and a number of devices: search, plan, proof, and a YAML with a reason for each key."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindllm.architecture.experts import PLACES
from mindllm.config import RunConfig
from mindllm.config.reading.document import KeyPath
from mindllm.config.reading.load import plain
from mindllm.config.reading.overrides import Overrides
from mindllm.errors import CheckFailed, UserError, shortened
from mindllm.prove.answers import Standing
from mindllm.prove.proof import Proof
from mindllm.prove.questions import MEMORY
from mindllm.recipes.common import rate_choices
from mindllm.recipes.device import ASCEND
from mindllm.recipes.network import Network
from mindllm.recipes.rates import PRETRAIN, Case
from mindllm.recipes.recipe import Choice, MadeRun, Recipe, override_keys, removal_note, remove_spares
from mindllm.results import Result
from mindllm.strategies.constraints import UNLIMITED, Constraints
from mindllm.strategies.dispatch import CAPACITY, DISPATCHER, GROUPED
from mindllm.strategies.low_utilisation import explain_utilisation
from mindllm.strategies.outcome import Strategies, Wanted, find_strategies
from mindllm.strategies.search import Planned, decided_keys
from mindllm.terminal.progress import Progress, unwatched
from mindllm.timing.device import Device
from mindllm.timing.stage_times import mean_stage
from mindllm.units import GIB, counted

if TYPE_CHECKING:
    from mindllm.results import Part

MEMORY_SHARE = 0.907  # of device memory: 58 of 64 GB, as in the shipped runs for Atlas 800T A2
SEQUENCES, LONGEST = 512, 4096  # defaults: sequences per step, and most tokens per sequence
BALANCE_FACTOR = 0.001  # of the balancing loss, and update rate of the bias, as in the shipped MoE runs
PLANNED, SECONDS = 3, 4.0  # number of strategies to plan, and the time limit of each
REASONS = {
    "use_parallel": "multiple devices",
    "parallel_config.data_parallel": "replicas, each with a part of the batch",
    "parallel_config.model_parallel": "tensor parallelism inside a node",
    "parallel_config.pipeline_stage": "pipeline stages",
    "parallel_config.micro_batch_num": "micro-batches that fill the pipeline",
    "parallel_config.use_seq_parallel": "sequence parallelism over the tensor-parallel ranks",
    "parallel_config.expert_parallel": "groups of devices that split the experts",
    "parallel_config.expert_model_parallel": "devices that split each expert",
    "parallel_config.context_parallel": "devices that split each sequence",
    "runner_config.batch_size": "sequences per micro-batch",
    "runner_config.gradient_accumulation_steps": "sequential micro-batches without a pipeline",
    "parallel.enable_parallel_optimizer": "optimizer state sharded over replicas",
    "model.model_config.offset": "planned difference from an even split of layers over stages",
    "model.model_config.pp_interleave_num": "chunks of layers per stage",
    "parallel.pipeline_config.pipeline_interleave": "interleaved chunks",
    GROUPED: "tokens sorted by expert: no padding, no dropped tokens",
    DISPATCHER: "faster dispatch of sorted tokens for balanced routing",
    "recompute_config.recompute": "planned recomputed layers per stage: as few as fit",
    "recompute_config.select_recompute": "layers per stage that recompute the elementwise products of their feed-forward",
}
FASTEST = "set by the fastest strategy that fits"


@dataclass(frozen=True)
class Request:
    """A network, its devices, and limits of the search.

    Attributes:
        devices: number of devices; with ``fewer``, the largest number.
        global_batch: sequences per step; None: that of the network's run, else :data:`SEQUENCES`.
        seq_length: tokens per sequence; None: that of the network's run.
        memory: memory limit of a device, such as ``58GB``; None: its memory minus a reserve.
        fewer: use the fewest devices that reach the minimum speed of ``constraints``.
        data: prefix of the indexed corpus; empty: not known yet.
    """

    network: Network
    device: Device
    devices: int
    global_batch: int | None = None
    seq_length: int | None = None
    memory: str | None = None
    constraints: Constraints = UNLIMITED
    fewer: bool = False
    data: str = ""
    overrides: Overrides = ()


@dataclass(frozen=True, repr=False)
class Configured(Result):
    """The run of a request.

    Attributes:
        made: the run with a reason for each key.
        strategies: the strategies of the search.
        device_count: number of devices.
        proof: its proof; None if it is estimated only.
        path: the YAML that was written; None if none was.
    """

    made: MadeRun
    strategies: Strategies
    device_count: int
    proof: Proof | None = None
    path: Path | None = None

    @property
    def config(self) -> RunConfig:
        """The run."""
        return self.made.config

    def write(self, path: Path | str) -> tuple[Path, ...]:
        """Write the run as a YAML: a base and the differences, each key with its reason.

        Returns:
            The plan book and layouts of another run next to it, which are removed: a restart would use them.
        """
        removed = remove_spares(Path(path), self.config)
        self.made.write(Path(path))
        return removed

    def summary(self) -> str:
        """Return the strategy and its step time."""
        return self.strategies.summary()

    def tree(self) -> dict[str, Any]:
        """Return the content of ``--json`` without the file."""
        return {
            "devices": self.device_count,
            "yaml": self.made.yaml(),
            "choices": [asdict(choice) for choice in self.made.choices],
            "strategies": {key: value for key, value in self.strategies.to_dict().items() if key != "candidates"},
            "proof": self.proof.to_dict() if self.proof else None,
        }

    def parts(self) -> Iterator[Part]:
        """Yield the proof, the choices with their reasons, and the second best strategy."""
        yield from self.proof.parts() if self.proof else ()
        yield self.made.table()
        yield from self.lines()

    def lines(self) -> Iterator[str]:
        """Yield the chosen and the second best strategy in words."""
        best, others = self.strategies.recommended, self.strategies.best
        yield (
            f"{best.candidate.name} on {counted(self.device_count, 'device')}: {best.step.seconds:.2f} s per step, "
            f"{best.step.tokens_per_device * self.device_count:,.0f} tokens/s predicted, "
            f"{max(best.memory) / GIB:.1f} GB of {best.room(self.strategies.limit).bound} {best.source}"
        )
        second = next((one for one in others if one is not best and one.candidate != best.candidate), None)
        yield f"second best: {second_best(best, second)}" if second else "no other strategy fits after planning"
        yield from self.strategies.dispatch_lines()
        yield from explain_utilisation(best.step, "it")
        if best.step.uncounted:
            yield f"not counted: {'; '.join(best.step.uncounted)}"


def second_best(best: Planned, second: Planned) -> str:
    """Return how much slower a strategy is, from the seconds as shown, and the largest cause."""
    shown = [round(one.step.seconds, 2) or one.step.seconds for one in (second, best)]
    slower = shown[0] / shown[1] - 1
    first, other = mean_stage(best.step), mean_stage(second.step)
    more = {name: other.get(name, 0.0) - first.get(name, 0.0) for name in {*first, *other}}
    cause, seconds = max(more.items(), key=lambda item: item[1])
    memory = f"{max(second.memory) / GIB:.1f} GB"
    step = f"{second.step.seconds:.2f} s per step"
    return f"{second.candidate.name}, {step}, {slower:.1%} slower ({seconds:+.2f} s of {cause} per step), {memory}"


def find_run(
    request: Request,
    command: str,
    dry_run: int | None = None,
    output: Path | None = None,
    progress: Progress = unwatched,
) -> Configured:
    """Return the fastest run of a request, planned; check ``dry_run`` of the best strategies by MindSpore's dry run.

    Raises:
        CheckFailed: no strategy fits, or none is fast enough.
        UserError: the network has a feature that is not modelled.
    """
    _refuse_decided(request)
    recipe = _base_recipe(request, command)
    made = recipe.made(request.overrides)
    batch = request.global_batch or (made.config.global_batch_size if request.network.config else SEQUENCES)
    failure = None
    for devices in _counts(request):
        limits = Wanted(devices, batch, PLANNED, SECONDS, dry_run, request.constraints)
        try:
            strategies = find_strategies(made.config, request.device, limits, output, progress)
        except CheckFailed as error:
            failure = error
            continue
        changes = tuple(_changes(made.config, strategies.config))
        final = recipe.with_choices(changes).made(request.overrides)
        return Configured(final, strategies, devices)
    assert failure is not None
    raise failure


Prover = Callable[[RunConfig, str, Path | None], Proof]
"""Proves a run, with the name and the directory of the proof."""


def configure_run(
    request: Request,
    command: str,
    output: Path | None = None,
    prove: Prover | None = None,
    progress: Progress = unwatched,
) -> Configured:
    """Return the run of a request, with its proof unless ``prove`` is None; write both to ``output``.

    Raises:
        CheckFailed: no strategy fits, or none is fast enough.
        UserError: the network has a feature that is not modelled, or a file is not writable.
    """
    run = find_run(request, command, progress=progress)
    path = output
    if path is not None and path.is_dir():
        path /= f"{request.network.name}_{run.device_count}p.yaml"
    if prove is not None:
        name, directory = ("", None) if path is None else (str(path), proof_directory(path))
        again = partial(find_run, request, command, dry_run=1, progress=progress)
        run = prove_found(run, again, lambda config: prove(config, name, directory))
    if path is not None and (note := removal_note(path, run.write(path))):
        progress(note)
    return replace(run, path=path)


def proof_directory(path: Path) -> Path:
    """Return the directory of the proof of the run at ``path``."""
    return path.with_name(f"{path.stem}_proof")


def prove_found(
    found: Configured, again: Callable[[], Configured], prove: Callable[[RunConfig], Proof], most: int = 2
) -> Configured:
    """Return a run with its proof; if the dry run refutes its memory, prove the run that ``again`` finds by dry runs."""
    proof = prove(found.config)
    for _ in range(most):
        if proof.answer(MEMORY).standing is not Standing.REFUTED:
            break
        found = again()
        proof = prove(found.config)
    return replace(found, proof=proof)


def _counts(request: Request) -> list[int]:
    """Return the device counts to try in order; the first that fits is used."""
    if not request.fewer:
        return [request.devices]
    powers = [1 << power for power in range(request.devices.bit_length())]
    return sorted({*(count for count in powers if count <= request.devices), request.devices})


def _base_recipe(request: Request, command: str) -> Recipe:
    """Return the recipe of a network before the search."""
    network = request.network
    chosen = [Choice("run_mode", "train", "set by the command"), Choice("context.device_target", ASCEND, "devices")]
    chosen += network.choices(own_vocabulary=False, vocab_size=0)
    if network.config is None:
        case = Case(PRETRAIN, network.architecture.parameter_count(), 0, ASCEND)
        chosen += rate_choices(case, lambda key: None, {})
        chosen.append(Choice("trainer.model_name", network.name, "name in logs"))
        length = request.seq_length or min(network.architecture.max_position_embedding, LONGEST)
        why = "requested" if request.seq_length else f"model limit: {network.architecture.max_position_embedding}"
        chosen.append(Choice("model.model_config.seq_length", length, why))
    elif request.seq_length:
        chosen.append(Choice("model.model_config.seq_length", request.seq_length, "requested"))
    chosen += _expert_choices(network, request.constraints)
    memory = request.memory or f"{int(MEMORY_SHARE * request.device.memory_size.value / GIB)}GB"
    why = (
        "requested" if request.memory else f"of {request.device.memory_size.value / GIB:g} GB of {request.device.name}"
    )
    chosen.append(Choice("context.max_device_memory", memory, why))
    if request.data:
        chosen.append(Choice("train_dataset.data_loader.config.data_path", request.data, "requested"))
    return Recipe(command, network.base, tuple(chosen))


def _expert_choices(network: Network, constraints: Constraints) -> Iterator[Choice]:
    """Yield settings of a MoE model without a YAML of the user: balanced experts that drop no tokens.

    A network is the same run by its shipped name and by its directory. With dispatch to places, the shipped capacity stays.
    """
    model = network.architecture
    if model.expert_num == 1 or network.is_file:
        return
    if model.capacity_factor is not None and PLACES not in constraints.dispatch:
        why = f"no dropped tokens; the shipped run drops those beyond {model.capacity_factor:g} times an even share"
        yield Choice(CAPACITY, None, why)
    if network.config is None:
        section, why = "model.model_config", "balances experts, as in the shipped MoE runs"
        yield Choice(f"{section}.aux_loss_types", ["expert"], why)
        yield Choice(f"{section}.aux_loss_factors", [BALANCE_FACTOR], why)
        if model.balance_via_topk_bias:
            yield Choice(f"{section}.topk_bias_update_rate", BALANCE_FACTOR, why)


def _refuse_decided(request: Request) -> None:
    """Raise UserError if overrides set keys that the search decides, other than the capacity of experts."""
    decided = decided_keys() - {CAPACITY}
    keys = [
        f"{key} (value {shortened(value)})"
        for key, value in _dotted(override_keys(request.network.base, request.overrides))
        if any(f"{key}.".startswith(f"{one}.") for one in decided)
    ]
    if keys:
        raise UserError(
            f"{', '.join(keys)}: is set by the search; remove it, and limit the search instead "
            "(--global-batch, --max-tensor-parallel, --max-stages, --no-attention-recompute, --dispatch)"
        )


def _dotted(tree: Mapping[str, Any], section: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted key of every value in a tree, with the value."""
    for name, value in tree.items():
        key = f"{section}{name}"
        if isinstance(value, dict):
            yield from _dotted(value, f"{key}.")
        else:
            yield key, value


def _changes(before: RunConfig, after: RunConfig) -> Iterator[Choice]:
    """Yield each key that the search changed, with the reason."""
    old, new = (plain(config.model_dump(by_alias=True)) for config in (before, after))
    for path, value in _leaves(old, new, ()):
        key = ".".join(path)
        yield Choice(key, value, REASONS.get(key, FASTEST))


def _leaves(old: Any, new: Any, path: KeyPath) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(old, dict) and isinstance(new, dict):
        for name, value in new.items():
            if name not in old or old[name] != value:
                yield from _leaves(old.get(name), value, (*path, name))
    else:
        yield tuple(map(str, path)), new
