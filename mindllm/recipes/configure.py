"""From a network and a number of devices to a run: searched, planned, proved, and written with a reason for every key."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
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
from mindllm.recipes.recipe import Choice, MadeRun, Recipe, asked_keys
from mindllm.recipes.spare_files import forget_spares
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

TAKEN = 0.907  # of a device's memory: 58 of 64 GB, as the shipped runs of an Atlas 800T A2 have it
SEQUENCES, LONGEST = 512, 4096  # of a step, and tokens of one at most, where nobody says how many
BALANCE_FACTOR = 0.001  # of the loss that keeps experts balanced, and rate of their bias: as in the shipped mixtures
PLANNED, SECONDS = 3, 4.0  # strategies that are planned, and for how long each
WHY = {
    "use_parallel": "several devices",
    "parallel_config.data_parallel": "replicas, each with its part of the batch",
    "parallel_config.model_parallel": "tensor parallel: devices that share every product, inside a node",
    "parallel_config.pipeline_stage": "stages of layers",
    "parallel_config.micro_batch_num": "micro-batches that fill the pipeline",
    "parallel_config.use_seq_parallel": "norms and sums of a sequence are split over the tensor-parallel ranks, too",
    "parallel_config.expert_parallel": "groups of devices that share the experts",
    "parallel_config.expert_model_parallel": "devices that share each expert",
    "parallel_config.context_parallel": "devices that share each sequence",
    "runner_config.batch_size": "sequences of a micro-batch",
    "runner_config.gradient_accumulation_steps": "micro-batches one after the other, where there is no pipeline",
    "parallel.enable_parallel_optimizer": "replicas share the optimizer's state",
    "model.model_config.offset": "layers of each stage beside an even split, as planned",
    "model.model_config.pp_interleave_num": "chunks of layers of each stage",
    "parallel.pipeline_config.pipeline_interleave": "chunks of a stage take turns",
    GROUPED: "tokens are sorted by expert: no place stays empty, and no token is dropped",
    DISPATCHER: "the faster way for sorted tokens to reach their experts, if routing is balanced",
    "recompute_config.recompute": "layers computed again in the backward pass, by stage, as planned: as few as fit",
    "recompute_config.select_recompute": "layers that recompute what their feed-forward multiplies elementwise, by stage",
}
BY_THE_SEARCH = "as the fastest strategy that fits has it"


@dataclass(frozen=True)
class Request:
    """What a person asks for.

    Attributes:
        devices: how many; with ``fewer`` at most so many.
        global_batch: sequences of a step; None: those of the network's own run, else :data:`SEQUENCES`.
        seq_length: tokens of a sequence; None: those of the network's own run.
        memory: of a device, as ``58GB``; None: what the device has, but for a reserve.
        fewer: whether the fewest devices are wanted that reach the least speed of ``constraints``.
        data: prefix of the indexed corpus; empty: none yet.
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
    """A run that was found for a request.

    Attributes:
        made: the run, and why each key of it is what it is.
        strategies: what it was chosen among.
        device_count: devices it takes.
        proof: its proof; None where it was found by formula alone.
    """

    made: MadeRun
    strategies: Strategies
    device_count: int
    proof: Proof | None = None

    @property
    def config(self) -> RunConfig:
        """The run."""
        return self.made.config

    def write(self, path: Path | str) -> tuple[Path, ...]:
        """Write the run as a YAML: a base and what differs, each key with its reason.

        Returns:
            The book and the layouts of another run that were beside it, which are removed: a restart would take them.
        """
        removed = forget_spares(Path(path), self.config)
        self.made.write(Path(path))
        return removed

    def summary(self) -> str:
        """Return the strategy and its step."""
        return self.strategies.summary()

    def tree(self) -> dict[str, Any]:
        """Return what ``--json`` prints but for the file."""
        return {
            "devices": self.device_count,
            "yaml": self.made.yaml(),
            "choices": [asdict(choice) for choice in self.made.choices],
            "strategies": {key: value for key, value in self.strategies.to_dict().items() if key != "candidates"},
            "proof": self.proof.to_dict() if self.proof else None,
        }

    def parts(self) -> Iterator[Part]:
        """Yield the proof, the choices with their reasons, and what was second best."""
        yield from self.proof.parts() if self.proof else ()
        yield self.made.table()
        yield from self.lines()

    def lines(self) -> Iterator[str]:
        """What was chosen, and what was second best and why, in words."""
        best, others = self.strategies.recommended, self.strategies.best
        yield (
            f"{best.candidate.name} on {counted(self.device_count, 'device')}: {best.step.seconds:.2f} s a step, "
            f"{best.step.tokens_per_device * self.device_count:,.0f} tokens/s predicted, "
            f"{max(best.memory) / GIB:.1f} GB of {best.room(self.strategies.limit).bound} {best.source}"
        )
        second = next((one for one in others if one is not best and one.candidate != best.candidate), None)
        yield f"second best: {second_best(best, second)}" if second else "nothing else of the best fits when planned"
        yield from self.strategies.dispatch_lines()
        yield from explain_utilisation(best.step, "it")
        if best.step.uncounted:
            yield f"not counted: {'; '.join(best.step.uncounted)}"


def second_best(best: Planned, second: Planned) -> str:
    """Return how much slower a strategy is, by the seconds that are shown, and the largest cause."""
    shown = [round(one.step.seconds, 2) or one.step.seconds for one in (second, best)]
    slower = shown[0] / shown[1] - 1
    first, other = mean_stage(best.step), mean_stage(second.step)
    more = {name: other.get(name, 0.0) - first.get(name, 0.0) for name in {*first, *other}}
    cause, seconds = max(more.items(), key=lambda item: item[1])
    memory = f"{max(second.memory) / GIB:.1f} GB"
    step = f"{second.step.seconds:.2f} s a step"
    return f"{second.candidate.name}, {step}, {slower:.1%} slower ({seconds:+.2f} s of {cause} a step), {memory}"


def find_run(
    request: Request,
    command: str,
    dry_run: int | None = None,
    output: Path | None = None,
    progress: Progress = unwatched,
) -> Configured:
    """Return the fastest run that a request allows, planned; ``dry_run`` of the best are held to MindSpore's dry run.

    Raises:
        CheckFailed: nothing fits, or nothing is as fast as was wanted.
        UserError: the network has something that is not modelled.
    """
    _refuse_decided(request)
    recipe = _before_the_search(request, command)
    made = recipe.made(request.overrides)
    batch = request.global_batch or (made.config.global_batch_size if request.network.config else SEQUENCES)
    tried = None
    for devices in _counts(request):
        wanted = Wanted(devices, batch, PLANNED, SECONDS, dry_run, request.constraints)
        try:
            strategies = find_strategies(made.config, request.device, wanted, output, progress)
        except CheckFailed as error:
            tried = error
            continue
        changes = tuple(_changes(made.config, strategies.config))
        final = recipe.with_choices(changes).made(request.overrides)
        return Configured(final, strategies, devices)
    assert tried is not None
    raise tried


def prove_found(
    found: Configured, again: Callable[[], Configured], prove: Callable[[RunConfig], Proof], most: int = 2
) -> Configured:
    """Return a run with its proof; where the dry run refutes its memory, ``again`` finds one by the dry run, proved in turn."""
    proof = prove(found.config)
    for _ in range(most):
        if proof.answer(MEMORY).standing is not Standing.REFUTED:
            break
        found = again()
        proof = prove(found.config)
    return replace(found, proof=proof)


def _counts(request: Request) -> list[int]:
    """Numbers of devices that are tried, the first that serves is taken."""
    if not request.fewer:
        return [request.devices]
    powers = [1 << power for power in range(request.devices.bit_length())]
    return sorted({*(count for count in powers if count <= request.devices), request.devices})


def _before_the_search(request: Request, command: str) -> Recipe:
    network = request.network
    chosen = [Choice("run_mode", "train", "the verb"), Choice("context.device_target", ASCEND, "devices")]
    chosen += network.choices(own_vocabulary=False, vocab_size=0)
    if network.config is None:
        case = Case(PRETRAIN, network.architecture.parameter_count(), 0, ASCEND)
        chosen += rate_choices(case, lambda key: None, {})
        chosen.append(Choice("trainer.model_name", network.name, "in the log"))
        length = request.seq_length or min(network.architecture.max_position_embedding, LONGEST)
        why = "asked for" if request.seq_length else f"of the model's {network.architecture.max_position_embedding}"
        chosen.append(Choice("model.model_config.seq_length", length, why))
    elif request.seq_length:
        chosen.append(Choice("model.model_config.seq_length", request.seq_length, "asked for"))
    chosen += _expert_choices(network, request.constraints)
    memory = request.memory or f"{int(TAKEN * request.device.memory_size.value / GIB)}GB"
    why = (
        "asked for" if request.memory else f"of {request.device.memory_size.value / GIB:g} GB of {request.device.name}"
    )
    chosen.append(Choice("context.max_device_memory", memory, why))
    if request.data:
        chosen.append(Choice("train_dataset.data_loader.config.data_path", request.data, "asked for"))
    return Recipe(command, network.base, tuple(chosen))


def _expert_choices(network: Network, constraints: Constraints) -> Iterator[Choice]:
    """Yield what a mixture trains with if no YAML of a person says it: experts that drop no token, kept balanced.

    So a network is the same run by its shipped name and by its directory. A shipped capacity stays if places are asked for.
    """
    model = network.architecture
    if model.expert_num == 1 or network.is_file:
        return
    if model.capacity_factor is not None and PLACES not in constraints.dispatch:
        why = f"no token is dropped; the shipped run drops those beyond {model.capacity_factor:g} of an even share"
        yield Choice(CAPACITY, None, why)
    if network.config is None:
        section, why = "model.model_config", "keeps experts balanced, as in the shipped mixtures"
        yield Choice(f"{section}.aux_loss_types", ["expert"], why)
        yield Choice(f"{section}.aux_loss_factors", [BALANCE_FACTOR], why)
        if model.balance_via_topk_bias:
            yield Choice(f"{section}.topk_bias_update_rate", BALANCE_FACTOR, why)


def _refuse_decided(request: Request) -> None:
    """Raise UserError if a person sets keys that the search decides; a capacity of experts is the person's to set."""
    decided = decided_keys() - {CAPACITY}
    asked = [
        f"{key} (value {shortened(value)})"
        for key, value in _dotted(asked_keys(request.network.base, request.overrides))
        if any(f"{key}.".startswith(f"{one}.") for one in decided)
    ]
    if asked:
        raise UserError(
            f"{', '.join(asked)}: the search decides this; leave it out, and limit the search instead "
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
    """Yield every key that the search has changed, with the reason."""
    former, wanted = (plain(config.model_dump(by_alias=True)) for config in (before, after))
    for path, value in _leaves(former, wanted, ()):
        key = ".".join(path)
        yield Choice(key, value, WHY.get(key, BY_THE_SEARCH))


def _leaves(former: Any, wanted: Any, path: KeyPath) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(former, dict) and isinstance(wanted, dict):
        for name, value in wanted.items():
            if name not in former or former[name] != value:
                yield from _leaves(former.get(name), value, (*path, name))
    else:
        yield tuple(map(str, path)), wanted
