"""What a training run is given where nobody says it: one table, each row with its reason and, where it has one, its source.

A row holds for the methods, sizes and devices that it names; the first row of a name that holds is the one that counts. Names
with a dot are keys of a run and are written into its YAML; the others are figures that keys are computed from (``tuning.py``,
``pretraining.py``). ``docs/recipes.md`` shows the table.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mindllm.recipes.device import ASCEND, CPU
from mindllm.terminal.tables import Table, texts

PRETRAIN = "pretrain"
ADAPTERS = ("lora", "dora", "qlora")  # one kind of adapter, trained beside three forms of a base
PAIRS, UNPAIRED = "dpo", "kto"
PREFERENCES = (PAIRS, UNPAIRED)
WHOLE = ("full", "galore", "lisa")  # all weights are trained
METHODS = (*ADAPTERS, *PREFERENCES, "adalora", "adapter", "llamapro", *WHOLE)
"""Of ``mindllm finetune``."""
LOW_RANK = (*ADAPTERS, *PREFERENCES)
TUNING = METHODS

SWIFT = "ms-swift, command-line parameters"
FACTORY = "LLaMA-Factory, examples/train_lora"
FACTORY_FULL = "LLaMA-Factory, examples/train_full"
QLORA = "Dettmers et al., 2023 (QLoRA), table 9"
GPT3 = "Brown et al., 2020 (GPT-3), table 2.1"
GPT3_TEXT = "Brown et al., 2020 (GPT-3), appendix B"
HANDBOOK = "alignment-handbook, recipes/smollm2"
SMALL = 2e9  # parameters
PET = "model.model_config.pet_config"


@dataclass(frozen=True)
class Rate:
    """A row: what ``name`` is, why, and where it is from; for which methods, sizes and device. Nothing named: for all."""

    name: str
    value: Any
    reason: str
    source: str = ""
    methods: tuple[str, ...] = ()
    most_parameters: float = math.inf
    most_rows: float = math.inf
    device: str = ""

    @property
    def is_key(self) -> bool:
        """Whether it is a key of a run, which is written as it stands."""
        return "." in self.name

    @property
    def why(self) -> str:
        """The reason as a comment: with the source."""
        return f"{self.reason} ({self.source})" if self.source else self.reason

    def holds(self, case: Case) -> bool:
        """Whether the row is about a run."""
        return (
            (not self.methods or case.method in self.methods)
            and case.parameters <= self.most_parameters
            and case.rows <= self.most_rows
            and self.device in ("", case.device)
        )

    def where(self) -> str:
        """For which runs, in words."""
        of = {METHODS: "finetune", LOW_RANK: "lora, dora, qlora, dpo, kto"}.get(self.methods, ", ".join(self.methods))
        sizes = [f"up to {self.most_parameters / 1e9:g}B parameters"] if self.most_parameters < math.inf else []
        rows = [f"up to {self.most_rows:,g} rows"] if self.most_rows < math.inf else []
        return "; ".join(part for part in (of, *sizes, *rows, self.device) if part) or "all"


@dataclass(frozen=True)
class Case:
    """What rows are about: a method, the parameters of the model, the rows (of text: documents) there are, and the device."""

    method: str
    parameters: float
    rows: float
    device: str


TABLE = (
    # How fast
    Rate("lr_schedule.learning_rate", 5e-6, "preferred answers, adapters", FACTORY, PREFERENCES),
    Rate("lr_schedule.learning_rate", 2e-4, "adapters; small models take a larger rate", QLORA, ADAPTERS, SMALL),
    Rate("lr_schedule.learning_rate", 1e-4, "adapters", f"{SWIFT}; {FACTORY}", ADAPTERS),
    Rate("lr_schedule.learning_rate", 1e-3, "its ranks begin at 0", "Zhang et al., 2023 (AdaLoRA), table 8", ("adalora",)),
    Rate("lr_schedule.learning_rate", 1e-4, "new modules beside a frozen model", SWIFT, ("adapter",)),
    Rate("lr_schedule.learning_rate", 1e-4, "new layers", "LLaMA-Factory, examples/extras/llama_pro", ("llamapro",)),
    Rate("lr_schedule.learning_rate", 1e-4, "projected updates", "LLaMA-Factory, examples/extras/galore", ("galore",)),
    Rate("lr_schedule.learning_rate", 5e-5, "all weights of a small model", f"below the 3e-4 of {HANDBOOK}", WHOLE, SMALL),
    Rate("lr_schedule.learning_rate", 1e-5, "all weights", f"{SWIFT}; {FACTORY_FULL}", WHOLE),
    Rate("lr_schedule.learning_rate", 6e-4, "by size", GPT3, (PRETRAIN,), 2e8),
    Rate("lr_schedule.learning_rate", 3e-4, "by size", GPT3, (PRETRAIN,), 6e8),
    Rate("lr_schedule.learning_rate", 2e-4, "by size", GPT3, (PRETRAIN,), SMALL),
    Rate("lr_schedule.learning_rate", 1.2e-4, "by size", GPT3, (PRETRAIN,), 1e10),
    Rate("lr_schedule.learning_rate", 1e-4, "by size", GPT3, (PRETRAIN,), 5e10),
    Rate("lr_schedule.learning_rate", 6e-5, "by size", GPT3, (PRETRAIN,)),
    Rate("lr_schedule.type", "CosineWithWarmUpLR", "the usual one", f"{SWIFT}; {FACTORY}; {GPT3_TEXT}"),
    Rate("lr_schedule.warmup_ratio", 0.1, "part of the steps", FACTORY, TUNING),
    Rate("lr_schedule.warmup_ratio", 0.02, "part of the steps", "", (PRETRAIN,)),
    Rate("end of the rate", 0.0, "of the peak", FACTORY, TUNING),
    Rate("end of the rate", 0.1, "of the peak", GPT3_TEXT, (PRETRAIN,)),
    # What is trained
    Rate(f"{PET}.pet_type", "lora", "adapters", "Hu et al., 2021", LOW_RANK),
    Rate(f"{PET}.pet_type", "adalora", "adapters whose ranks go where they matter", "Zhang et al., 2023", ("adalora",)),
    Rate(f"{PET}.pet_type", "bottleneck", "modules behind attention and feed-forward", "Houlsby et al., 2019", ("adapter",)),
    Rate(f"{PET}.pet_type", "llamapro", "new layers", "Wu et al., 2024", ("llamapro",)),
    Rate(f"{PET}.pet_type", "galore", "all weights, projected moments", "Zhao et al., 2024", ("galore",)),
    Rate(f"{PET}.pet_type", "lisa", "some layers at a time", "Pan et al., 2024", ("lisa",)),
    Rate(f"{PET}.lora_rank", 8, "of the adapters", f"{SWIFT}; {FACTORY}", LOW_RANK),
    Rate(f"{PET}.lora_alpha", 16.0, "twice the rank", "LLaMA-Factory", (*LOW_RANK, "adalora")),
    Rate(f"{PET}.target_modules", "ALL", "every projection of the layers", f"{SWIFT}; {QLORA}", (*LOW_RANK, "adalora")),
    Rate(f"{PET}.use_dora", True, "lengths of rows are trained by themselves", "Liu et al., 2024", ("dora",)),
    Rate(f"{PET}.adalora_init_r", 12, "rank at the start", SWIFT, ("adalora",)),
    Rate(f"{PET}.adalora_target_r", 8, "rank at the end, on average", SWIFT, ("adalora",)),
    Rate(f"{PET}.adapter_length", 128, "width of the modules", SWIFT, ("adapter",)),
    Rate(f"{PET}.num_new_blocks", 4, "new layers; divides those of the model", SWIFT, ("llamapro",)),
    Rate(f"{PET}.galore_rank", 128, "of projected gradients", SWIFT, ("galore",)),
    Rate(f"{PET}.galore_update_proj_gap", 200, "steps from one projection to the next", "Zhao et al., 2024", ("galore",)),
    Rate(f"{PET}.lisa_activated_layers", 2, "at a time", SWIFT, ("lisa",)),
    Rate(f"{PET}.lisa_step_interval", 20, "steps from one draw to the next", SWIFT, ("lisa",)),
    Rate("adalora steps before", 0.1, "part of the steps before ranks are removed", "", ("adalora",)),
    Rate("adalora steps after", 0.2, "part of the steps with the last choice of ranks", "", ("adalora",)),
    Rate("preference.loss_type", "sigmoid", "DPO", "Rafailov et al., 2023", (PAIRS,)),
    Rate("preference.loss_type", "kto", "KTO", "Ethayarajh et al., 2024", (UNPAIRED,)),
    Rate("preference.beta", 0.1, "how far from the reference", FACTORY, PREFERENCES),
    # The update
    Rate("optimizer.type", "AdamW", "the usual one", f"{SWIFT}; {FACTORY}"),
    Rate("optimizer.betas", [0.9, 0.95], "decay of the moments", f"{SWIFT}; {GPT3_TEXT}"),
    Rate("optimizer.weight_decay", 0.0, "weights stay near those of the base anyway", FACTORY, TUNING),
    Rate("optimizer.weight_decay", 0.1, "decay of matrices", GPT3_TEXT, (PRETRAIN,)),
    Rate("runner_wrapper.max_grad_norm", 1.0, "clips gradients", f"{SWIFT}; {GPT3_TEXT}"),
    # How long, and how much at a time
    Rate("epochs", 3, "passes over the rows", f"{SWIFT}; {FACTORY}", TUNING),
    Rate("epochs", 1, "passes over the text", "", (PRETRAIN,)),
    Rate("most epochs", 10, "where few rows would make too few steps", "", TUNING),
    Rate("tokens of a parameter", 20, "more epochs where the text has fewer", "Hoffmann et al., 2022", (PRETRAIN,)),
    Rate("most epochs", 4, "more teach little", "Muennighoff et al., 2023", (PRETRAIN,)),
    Rate("least steps", 50, "more epochs, or smaller batches, up to this", "", TUNING),
    Rate("least steps", 200, "more epochs, or smaller batches, up to this", "", (PRETRAIN,)),
    Rate("rows of a step", 2, "of few rows, small batches", "", TUNING, most_rows=64),
    Rate("rows of a step", 4, "of few rows, small batches", "", TUNING, most_rows=256),
    Rate("rows of a step", 8, "global batch", FACTORY, TUNING, most_rows=10_000),
    Rate("rows of a step", 16, "global batch", SWIFT, TUNING),
    Rate("tokens of a step", 8192, "what a CPU does in a minute or so", "", (PRETRAIN,), device=CPU),
    Rate("tokens of a step", 524_288, "half a million", GPT3, (PRETRAIN,)),
    Rate("rows at once", 4, "more gain nothing on a CPU", "", device=CPU),
    Rate("rows at once", 8, "more gain little on a device", "", device=ASCEND),
    Rate("memory", 0.6, "part of what is free, as for every command", "", device=CPU),
    Rate("memory", 0.9, "part of context.max_device_memory: gaps and workspace take the rest", "", device=ASCEND),
    # Lengths
    Rate("quantile of lengths", 0.99, "longer rows are cut", "", TUNING),
    Rate("multiple of lengths", 64, "up to 512 tokens", "", TUNING),
    Rate("multiple of long lengths", 128, "above 512 tokens", "", TUNING),
    Rate("longest row", 2048, "longer rows take minutes on a CPU", f"{FACTORY} has it for any device", TUNING, device=CPU),
    Rate("longest row", 8192, "more only on demand", "", TUNING),
    Rate("longest row", 512, "for a CPU", "", (PRETRAIN,), device=CPU),
    Rate("longest row", 4096, "at most the context of the model", "", (PRETRAIN,)),
    Rate("padding", 0.25, "part of a batch above which rows are packed, where the steps stay enough", "", TUNING),
    # Looking and saving
    Rate("held out", 0.05, "part of the rows that is evaluated", "", TUNING),
    Rate("held out at least", 4, "rows, where it is evaluated at all", "", TUNING),
    Rate("held out at most", 200, "rows", "", TUNING),
    Rate("rows to hold any out", 24, "of fewer, all are trained on", "", TUNING),
    Rate("held out", 0.02, "part of the documents that is evaluated", "", (PRETRAIN,)),
    Rate("rows to hold any out", 100, "documents; of fewer, all are trained on", "", (PRETRAIN,)),
    Rate("eval_dataset.max_batches", 20, "of what is held out, so that looking takes little time", "", (PRETRAIN,)),
    Rate("saves", 3, "checkpoints in a run, each with an evaluation before", "", TUNING),
    Rate("saves", 10, "checkpoints in a run, each with an evaluation before", "", (PRETRAIN,)),
    Rate("most steps to a save", 500, "or earlier", f"{SWIFT}; {FACTORY}"),
    Rate("kept checkpoints", 2, "the newest; the disk pays for more"),
    # The tokenizer of a corpus that has none
    Rate("vocabulary", 4096, "tokens, for up to 10 MB of text", "", (PRETRAIN,), most_rows=1e7),
    Rate("vocabulary", 16_384, "tokens, for up to 1 GB of text", "", (PRETRAIN,), most_rows=1e9),
    Rate("vocabulary", 32_768, "tokens", "", (PRETRAIN,)),
)  # fmt: skip


def rate(name: str, case: Case) -> Rate:
    """Return the row of a name that counts for a run; KeyError where none is about it."""
    found = next((row for row in TABLE if row.name == name and row.holds(case)), None)
    if found is None:
        raise KeyError(name)
    return found


def figure(name: str, case: Case) -> Any:
    """Return the value of :func:`rate`."""
    return rate(name, case).value


def keys_of(case: Case) -> Iterator[Rate]:
    """Yield the rows that are keys of a run, each key once."""
    seen: set[str] = set()
    for row in TABLE:
        if row.is_key and row.holds(case) and row.name not in seen:
            seen.add(row.name)
            yield row


def table() -> Table:
    """Return all rows: name, for which runs, value, reason, source."""
    rows = [(row.name, row.where(), _shown(row.value), row.reason, row.source) for row in TABLE]
    return Table("", texts("key or figure", "of", "value", "why", "source"), rows)


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) and not isinstance(value, bool) else str(value)
