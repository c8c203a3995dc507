"""The same YAML through MindFormers and through mindllm, both in MindSpore's dry run: memory, operators, exchanges, compile time.

``bash scripts/mindformers.sh`` makes the environment of MindFormers 1.8 (MindSpore 2.7.2). Every case is
``examples/mindformers/qwen3_32b_4_layers.yaml`` with some keys changed; mindllm reads that file as it is. Both programs
are run by ``mindllm offline``, so one instrument measures both.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mindllm.command import CommandParser, output_file, run_command
from mindllm.compiled.graph.operators import Operators
from mindllm.errors import CheckFailed, RunFailed, UserError
from mindllm.programs.kept import kept_stages
from mindllm.terminal.console import error_console
from mindllm.timing.stage_graph import list_of_layers, seen_layers
from toolkit.benchmark.report import Tables, keep_rows, kept_rows, write_markdown

LEFT_OUT = object()
ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "mindformers"
YAML = EXAMPLE / "qwen3_32b_4_layers.yaml"
ENVIRONMENT = ROOT / ".venv-mindformers"
DATA = "random.mindrecord"
THEIRS, OURS = "MindFormers 1.8", "mindllm"
ENTERED = (
    "MINDLLM_SIMULATION"  # tells run_llm.py that it need not start itself again in the environment of a simulation
)
MODEL = "model.model_config"
EXPERTS: Mapping[str, Any] = {
    "parallel_config.expert_parallel": 2,
    "parallel.enable_alltoall": True,
    f"{MODEL}.hidden_act": "silu",
    f"{MODEL}.moe_grouped_gemm": True,
    f"{MODEL}.num_experts_per_tok": 8,
    f"{MODEL}.router_dense_type": "float32",
    f"{MODEL}.gated_linear_unit": True,
    f"{MODEL}.norm_topk_prob": True,
    f"{MODEL}.moe_token_drop_policy": "probs",
    f"{MODEL}.moe_router_load_balancing_type": "seq_aux_loss",
}
QWEN3_MOE: Mapping[str, Any] = {  # Qwen3 30B-A3B's widths with 4 layers of 16 experts
    **EXPERTS,
    "trainer.model_name": "qwen3_moe_4_layers",
    f"{MODEL}.model_type": "qwen3_moe",
    f"{MODEL}.architectures": ["Qwen3MoeForCausalLM"],
    f"{MODEL}.hidden_size": 2048,
    f"{MODEL}.intermediate_size": 6144,
    f"{MODEL}.num_attention_heads": 32,
    f"{MODEL}.num_key_value_heads": 4,
    f"{MODEL}.num_experts": 16,
    f"{MODEL}.moe_intermediate_size": 768,
    f"{MODEL}.moe_router_pre_softmax": True,
    f"{MODEL}.routed_scaling_factor": 1.0,
    f"{MODEL}.router_aux_loss_coef": 0.001,
    f"{MODEL}.moe_aux_loss_coeff": 0.001,
}
TEXT: Mapping[str, Any] = {
    "data_loader": {"type": "MindDataset", "dataset_dir": DATA, "shuffle": False},
    "input_columns": ["input_ids"],
    "num_parallel_workers": 1,
    "drop_remainder": True,
    "repeat": 1,
    "batch_size": 1,
}
LLAMA2: Mapping[str, Any] = {  # Llama 2 7B's widths with 4 layers, by MindFormers' networks of the old kind
    "use_legacy": True,
    "trainer.model_name": "llama2_7b_4_layers",
    "train_dataset": TEXT,
    "train_dataset_task": {"type": "CausalLanguageModelDataset", "dataset_config": TEXT},
    "parallel.dataset_strategy": [[2, 1]],
    "parallel_config.vocab_emb_dp": False,
    "model": {
        "arch": {"type": "LlamaForCausalLM"},
        "model_config": {
            "type": "LlamaConfig",
            "batch_size": 1,
            "seq_length": 4096,
            "hidden_size": 4096,
            "num_layers": 4,
            "num_heads": 32,
            "vocab_size": 32000,
            "multiple_of": 256,
            "rms_norm_eps": 1.0e-5,
            "pad_token_id": 0,
            "ignore_token_id": -100,
            "compute_dtype": "bfloat16",
            "layernorm_compute_type": "float32",
            "softmax_compute_type": "float32",
            "rotary_dtype": "float32",
            "param_init_type": "float32",
            "use_past": False,
            "use_flash_attention": True,
            "offset": 0,
        },
    },
}
DEEPSEEK_V3: Mapping[str, Any] = {  # its widths with a dense layer and one of 16 experts
    **EXPERTS,
    "trainer.model_name": "deepseek_v3_2_layers",
    f"{MODEL}.model_type": "deepseek_v3",
    f"{MODEL}.architectures": ["DeepseekV3ForCausalLM"],
    f"{MODEL}.vocab_size": 129280,
    f"{MODEL}.hidden_size": 7168,
    f"{MODEL}.intermediate_size": 18432,
    f"{MODEL}.num_hidden_layers": 2,
    f"{MODEL}.num_attention_heads": 128,
    f"{MODEL}.num_key_value_heads": LEFT_OUT,
    f"{MODEL}.head_dim": LEFT_OUT,
    f"{MODEL}.qkv_concat": LEFT_OUT,
    f"{MODEL}.rope_theta": 10000,
    f"{MODEL}.multi_latent_attention": True,
    f"{MODEL}.mla_qkv_concat": True,
    f"{MODEL}.kv_lora_rank": 512,
    f"{MODEL}.q_lora_rank": 1536,
    f"{MODEL}.qk_rope_head_dim": 64,
    f"{MODEL}.v_head_dim": 128,
    f"{MODEL}.qk_nope_head_dim": 128,
    f"{MODEL}.num_nextn_predict_layers": 0,
    f"{MODEL}.moe_intermediate_size": 2048,
    f"{MODEL}.routed_scaling_factor": 2.5,
    f"{MODEL}.first_k_dense_replace": 1,
    f"{MODEL}.n_routed_experts": 16,
    f"{MODEL}.n_shared_experts": 1,
    f"{MODEL}.n_group": 4,
    f"{MODEL}.topk_group": 2,
    f"{MODEL}.scoring_func": "sigmoid",
    f"{MODEL}.moe_router_enable_expert_bias": True,
    f"{MODEL}.moe_aux_loss_coeff": 0.0001,
}
NOTHING_RECOMPUTED = {"recompute_config.recompute": False}
STATIC = {"context.memory_optimize_level": "O1"}
CASES: Mapping[str, Mapping[str, Any]] = {
    "all recomputed, O0": {},
    "all recomputed, O1": STATIC,
    "nothing recomputed, O0": NOTHING_RECOMPUTED,
    "nothing recomputed, O1": {**NOTHING_RECOMPUTED, **STATIC},
    "Llama 2, O0": LLAMA2,
    "Qwen3-MoE, O0": QWEN3_MOE,
    "Qwen3-MoE, O1": {**QWEN3_MOE, **STATIC},
    "DeepSeek-V3, O0": DEEPSEEK_V3,
}
COLUMNS = (
    "case", "stage", "program", "used peak", "fragments", "operators", "exchanges", "compiled in s", "host memory",
)  # fmt: skip


@dataclass(frozen=True)
class Programs:
    """How both are started: MindFormers' Python, the directory of data and results."""

    python: Path
    directory: Path


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs both on every case and writes the page."""
    parser = CommandParser(
        prog="python -m toolkit.benchmark.mindformers",
        description=__doc__.splitlines()[0],
        epilog="example: python -m toolkit.benchmark.mindformers --markdown docs/benchmarks/mindformers.md",
    )
    parser.add_argument(
        "--python", type=Path, default=ENVIRONMENT / "bin" / "python", help="MindFormers' (%(default)s)"
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="NAME", help="only these")
    parser.add_argument(
        "--rows",
        type=output_file,
        metavar="FILE",
        help="keeps what was measured (JSON), so that a page is made in sittings (docs/benchmarks/mindformers.json)",
    )
    parser.add_argument("--markdown", type=Path, required=True, metavar="FILE", help="the page to write")
    options = parser.parse_args(arguments)
    if not options.python.is_file():
        raise UserError(f"{options.python} is not there; bash scripts/mindformers.sh makes it")
    rows = kept_rows(options.rows, "case", options.cases)
    with tempfile.TemporaryDirectory(prefix="mindllm_beside_") as name:
        for case in options.cases:
            rows += measure(Programs(options.python.absolute(), Path(name)), case)
            rows.sort(key=lambda row: list(CASES).index(row["case"]))
            keep_rows(options.rows, rows)
            write_page(options.markdown, rows)
    return 0


def write_page(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes the page with the command that measures its cases in one sitting."""
    measured = [case for case in CASES if case in {row["case"] for row in rows}]
    asked = "" if measured == list(CASES) else f"--cases {' '.join(map(repr, measured))} "
    command = f"python -m toolkit.benchmark.mindformers {asked}--markdown {path}"
    others = [text for name, text in OF_OTHERS.items() if any(case.startswith(name) for case in measured)]
    description = "\n".join([DESCRIPTION.strip(), *others])
    write_markdown(path, "Beside MindFormers", description, command, tables(rows), kept_from="What differs")


def measure(programs: Programs, case: str) -> list[dict[str, Any]]:
    """What ``mindllm offline`` says of every stage of a case, by both programs."""
    config = programs.directory / "run.yaml"
    config.write_text(yaml.safe_dump(changed(CASES[case]), sort_keys=False), encoding="utf-8")
    theirs = [str(programs.python), str(EXAMPLE / "run_mindformer.py"), "--config", str(config)]
    data = programs.directory / DATA
    own, output = f"--train_dataset.data_loader.dataset_dir={data}", programs.directory / "output"
    ours = [sys.executable, str(ROOT / "run_llm.py"), "--config", str(config), own, f"--output_dir={output}"]
    tree, found = changed(CASES[case]), []
    shifts = int(
        tree["use_legacy"]
    )  # a network of the old kind takes a row with one token more, and shifts labels itself
    _write_data(programs, tree["model"]["model_config"]["seq_length"] + shifts)
    for program, command, variables in ((THEIRS, theirs, {}), (OURS, [*ours, "--overwrite"], {ENTERED: "1"})):
        error_console.print(f"{case}: {program}")
        ranks = _offline(command, variables, programs.directory)
        found += [{"case": case, "program": program, **rank} for rank in ranks]
    return sorted(found, key=lambda row: row["stage"])


def changed(changes: Mapping[str, Any]) -> dict[str, Any]:
    """The example's YAML with the values of some dotted keys changed."""
    tree = yaml.safe_load(YAML.read_text(encoding="utf-8"))
    for key, value in changes.items():
        *around, last = key.split(".")
        section = tree
        for name in around:
            section = section[name]
        if value is LEFT_OUT:
            section.pop(last, None)
        else:
            section[last] = value
    return tree


def _write_data(programs: Programs, seq_length: int) -> None:
    command = [str(programs.python), str(EXAMPLE / "make_data.py"), f"--seq_length={seq_length}", DATA]
    _run(command, {}, programs.directory)


def _offline(command: Sequence[str], variables: Mapping[str, str], directory: Path) -> list[dict[str, Any]]:
    keep = directory / "kept"
    tool = [sys.executable, "-m", "mindllm.main", "offline", "--json", "--keep", str(keep), "--", *command]
    ranks = json.loads(_run(tool, {"PYTHONPATH": str(ROOT), **variables}, directory).splitlines()[-1])["ranks"]
    told = ({key: value for key, value in rank.items() if key != "kept"} for rank in ranks)  # a temporary directory
    return [{**rank, **found} for rank, found in zip(told, compiled_to(keep), strict=True)]


def compiled_to(keep: Path) -> list[dict[str, Any]]:
    """What the graphs of all kept stages hold: layers by recomputation, and exchanges by operator."""
    found = []
    ranks = kept_stages(keep)
    stages = [Operators(rank.graph) for rank in ranks]
    layers = list_of_layers(stages)
    for rank, operators in zip(ranks, stages, strict=True):
        kinds = Counter(layer.recompute for layer in seen_layers(operators, layers))
        exchanges = Counter(one.operator for one in rank.simulation.collectives)
        found.append({"layers": dict(kinds), "exchanges": dict(sorted(exchanges.items()))})
    return found


def _run(command: Sequence[str], variables: Mapping[str, str], directory: Path) -> str:
    environment = {**os.environ, **variables}
    result = subprocess.run(command, env=environment, cwd=directory, capture_output=True, text=True, check=False)
    if result.returncode not in (0, CheckFailed.exit_code):
        raise RunFailed(f"{' '.join(command)} ended with {result.returncode}\n{result.stderr.strip()[-2000:]}")
    return result.stdout


DESCRIPTION = """
One YAML of MindFormers (`examples/mindformers/qwen3_32b_4_layers.yaml`: 4 layers, rows of 4096 tokens, dp2 tp2 pp2,
4 micro-batches, sequence and optimizer parallel) through MindFormers 1.8.0 on MindSpore 2.7.2 and, as it is, through mindllm on
MindSpore 2.10.0, the first rank of each stage. Both are programs as they are, run by `mindllm offline`. Memory in MiB;
operators and exchanges (the collective ones among them) are those that were launched in a step. Times are of a busy machine:
they compare orders of magnitude. O0 and O1 are `memory_optimize_level`.
"""
OF_OTHERS = {
    "Llama 2": "Llama 2 is a network of the old kind (`use_legacy: true`): 7B's widths with 4 layers.",
    "Qwen3-MoE": "Qwen3-MoE has 30B-A3B's widths with 4 layers of 16 experts over 2 devices, chosen evenly there.",
    "DeepSeek-V3": "DeepSeek-V3 has its own widths with a dense layer and one of 16 experts over 2 devices, chosen likewise.",
}


def tables(rows: Sequence[Mapping[str, Any]]) -> Tables:
    """Every stage of both programs, and how many percent mindllm needs more or less."""
    lines = [
        (
            row["case"],
            str(row["stage"]),
            row["program"],
            f"{row['used_peak_mb']:,}",
            f"{row['actual_peak_mb'] - row['used_peak_mb']:,}",
            f"{row['operators']:,}",
            str(row["collectives"]),
            f"{row['compile_seconds']:.0f}",
            f"{row['host_mb']:,}",
        )
        for row in rows
    ]
    return [
        ("Stage by stage", COLUMNS, lines),
        ("Used peak", ("case", "stage", THEIRS, OURS, "difference"), _peaks(rows)),
        ("What the YAML became", ("case", "stage", "program", "weights", "layers", "exchanges"), _became(rows)),
    ]


def _became(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Weights of a rank in MiB, layers by recomputation, exchanges of a step by operator."""
    return [
        (
            row["case"],
            str(row["stage"]),
            row["program"],
            f"{row['weights_mb']:,.0f}",
            ", ".join(f"{count} {kind}" for kind, count in row["layers"].items()),
            ", ".join(f"{name} {count}" for name, count in row["exchanges"].items()),
        )
        for row in rows
        if "layers" in row
    ]


def _peaks(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    peaks = {(row["case"], row["stage"], row["program"]): row["used_peak_mb"] for row in rows}
    places = dict.fromkeys((case, stage) for case, stage, _ in peaks)
    pairs = [(case, stage, peaks[case, stage, THEIRS], peaks[case, stage, OURS]) for case, stage in places]
    return [
        (case, str(stage), f"{theirs:,}", f"{ours:,}", f"{ours / theirs - 1:+.1%}")
        for case, stage, theirs, ours in pairs
    ]


if __name__ == "__main__":
    run_command(main)
