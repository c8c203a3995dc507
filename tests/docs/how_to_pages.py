"""How each how-to page is followed: what its commands find, which take long, which do not run here and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import how_to_files as files

OWN_TEST = dict.fromkeys(("python", "python_planning", "python_runs"), "tests/api/test_python_page.py")
NETWORK, NODES, DEVICES = "needs a network", "needs several nodes", "needs Ascend devices"
TINY_CPU = "trains for minutes: tests/end_to_end/test_experts_on_a_laptop.py"
TRAINED = "goes on from a training of minutes; the page of its subject is followed"
MINDFORMERS = "needs MindFormers 1.8, whose environment takes 3 GB (scripts/mindformers.sh)"


@dataclass(frozen=True)
class Page:
    """How a page is followed; commands are named by a part of them.

    Attributes:
        files: writes what the commands find in their directory.
        slow_files: the same for those of ``slow`` alone.
        serves: a directory that a hub on this machine has.
        slow: commands that take seconds, or have MindSpore compile.
        not_here: why a command does not run here.
        codes: exit codes that are not 0.
        estimated: commands whose figures depend on the machine, or on how far a search comes in its seconds.
        others: commands that run on another program than the page's: of what they print, headings of tables are held.
        told: outputs that no command of the page prints, by a part of their first line, and where they are from.
    """

    files: Callable[[], None] = lambda: None
    slow_files: Callable[[], None] = lambda: None
    serves: str = ""
    slow: tuple[str, ...] = ()
    not_here: dict[str, str] = field(default_factory=dict)
    codes: dict[str, int] = field(default_factory=dict)
    estimated: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    told: dict[str, str] = field(default_factory=dict)

    def names(self) -> Iterator[str]:
        """Yield every part of a command that an entry names."""
        yield from (*self.slow, *self.not_here, *self.codes, *self.estimated, *self.others)

    def code(self, command: str) -> int:
        return next((code for part, code in self.codes.items() if part in command), 0)


HOW_TO = {
    "proving": Page(
        files.proving,
        slow_files=files.proved_before,
        slow=("prove run.yaml", "_13b_16p", "runs/a.yaml", "--against"),
        not_here={"pip install": NETWORK, "RAY_ADDRESS": f"{NODES}: tests/executor has a Ray of three on this one"},
        codes={"--quick": 1, "prove run.yaml": 3, "runs/a.yaml": 3},  # a utilisation of 0.2% is refuted, and said to be
        told={"proved 2026": "said where a run starts: tests/prove/test_found.py"},
    ),
    "cluster_check": Page(
        files.cluster_check,
        slow=("mindllm check",),
        not_here={"--table proven.md": "takes hours"},
        told={
            "1.448292 on a single device": "planted, as in tests/verify/test_cluster_check_faults.py",
            "no rank can go on": "planted, as in tests/compiled/test_execute_lockstep.py",
        },
    ),
    "dry_run": Page(slow=("mindllm dry-run",)),
    "compiled_graph": Page(told={"refuses the sharding": "planted, as in tests/compiled/test_compiler_refusals.py"}),
    "mindformers_yaml": Page(files.mindformers_yaml, slow=("pretrain_llama2_7b",), codes={"--model.": 2}),
    "any_program": Page(
        files.any_program,
        slow=("mindllm offline", "mindllm check --program cluster"),
        not_here={".venv-mindformers": MINDFORMERS, "eval": MINDFORMERS, "train.py": MINDFORMERS},
        codes={"loss_over_devices": 3},
        others=("inspect comm", "mindllm time"),
    ),
    "planning_a_run": Page(files.planning, slow=("mindllm plan",)),
    "pipeline_balance": Page(files.pipeline_balance, slow=("run.yaml --no-validate", "--apply run.yaml")),
    "step_time": Page(files.step_time, slow=("replay.py",)),
    "search": Page(
        slow=("mindllm search", "mindllm dry-run"),
        not_here={"qwen3_moe_235b": "takes minutes of a search"},
    ),
    "pipeline_schedules": Page(),
    "swapping": Page(slow=("mindllm plan",)),
    "overlap": Page(),
    "profiles": Page(files.profiles, not_here={"mindllm train": DEVICES}),
    "recipes": Page(
        files.recipes,
        slow=("finetune", "chat"),
        not_here={"mindllm pretrain": "trains a model of 0.5 billion parameters"},
    ),
    "data": Page(),
    "fine_tuning": Page(files.fine_tuning, slow=("mindllm finetune", "run_llm.py", "weights adapter", "weights merge")),
    "preference_tuning": Page(not_here={"finetune_llama2_tiny_dpo": TRAINED}),
    "optimizers": Page(),
    "experts": Page(
        not_here={
            "quickstart.sh": "installs into .venv",
            "pretrain_mixtral_tiny": TINY_CPU,
            "loss-curve": TINY_CPU,
        },
        slow=("dry-run", "mindllm check"),
        told={
            "largest load": "of a run of 400 steps; its form: tests/train/test_expert_loads.py",
            "mtp_loss": "of a run of 400 steps; the loss: tests/models/test_prediction.py",
        },
    ),
    "long_context": Page(
        slow=("dry-run", "check", "inspect"),
        told={"rank 0: 0 1 2 3": "the order itself: tests/models/test_balanced_attention.py"},
    ),
    "several_processes": Page(slow_files=files.corpus, slow=("msrun_launcher",)),
    "cluster_on_cpu": Page(slow_files=files.clusters, slow=("pretrain_llama2_tiny", "MS_SIM")),
    "clusters": Page(
        slow_files=files.clusters,
        slow=("dry_run.sh", "mindllm check", "preflight.sh"),
        not_here={
            "preflight.sh configs/llama2/pretrain_llama2_13b.yaml 16": NODES,
            '--restart 3 "run_llm.py': DEVICES,
        },
        codes={"preflight.sh": 3},
        estimated=("preflight.sh",),
    ),
    "schedulers": Page(not_here={"srun": NODES, "sbatch job.sh": NODES, "kubectl": NODES}),
    "failures": Page(
        slow_files=files.clusters, slow=("mindllm configure",), not_here={"mindllm launch run.yaml --restart": DEVICES}
    ),
    "accept": Page(
        not_here={"source": DEVICES, "--devices 8": DEVICES, "srun": NODES, "--devices 16": NODES}, slow=("--claims",)
    ),
    "dashboard": Page(
        not_here={"mindinsight.sh": f"{NETWORK}, and ends with Ctrl-C: tests/end_to_end/test_mindinsight.py"}
    ),
    "weights": Page(
        files.weights,
        serves="models/llama",
        slow=("run_llm.py", "mindllm generate", "mindllm finetune", "weights merge"),
        not_here={"pip install": NETWORK},
    ),
    "quantization": Page(files.quantization, slow=("lora.yaml", "weights")),
    "generation": Page(files.generation, slow=("run_llm.py",)),
    "evaluation": Page(files.evaluation, slow=("mindllm evaluate",), codes={"piqa": 1}),
    "editor": Page(),
    "tour": Page(
        slow=("output/eight",),
        slow_files=files.clusters,
        not_here={
            "output/trial": "trains for minutes",
            "output/llama2_tiny": TRAINED,
            "output/llama_hf": TRAINED,
            "finetune_llama2_tiny": TRAINED,
            "toolkit.benchmark.sweep": TRAINED,
            "corpus.jsonl.zst": "stands for one's own data",
            "msrun_launcher": "trains for minutes, as on several_processes.md",
        },
        codes={"num_head=8": 2, "n_kv_heads=3": 2},
        told={"== corpus": "of scripts/quickstart.sh, which installs into .venv and trains for minutes"},
    ),
    "tour_planning": Page(
        files.tour,
        slow=("MS_SIM", "dry_run.sh", "inspect", "mindllm check", "mindllm search"),
        slow_files=files.clusters,
    ),
}
