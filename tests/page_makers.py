"""Every kind of page and picture, made of small inputs, for those who look at them: tests in a browser, and people.

``PYTHONPATH=.:tests python -m page_makers DIRECTORY`` writes them all.
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

SEVENTY = "configs/llama2/pretrain_llama2_70b_64p.yaml"
ROOT = Path(__file__).resolve().parents[1]


def proof(directory: Path) -> Path:
    """A proof by formulas of a run of eight stages."""
    from mindllm.config import load_config
    from mindllm.prove.pieces import Options
    from mindllm.prove.prove import prove_run
    from mindllm.prove.write import write_proof

    write_proof(prove_run(load_config(ROOT / SEVENTY), Options(), SEVENTY, quick=True), directory / "proof")
    return directory / "proof" / "report.html"


def memory(directory: Path) -> Path:
    """Memory of four stages over time, two of them too full."""
    from dry_run_cases import FormulaSimulations, pipeline

    from mindllm.dry_run.forecast import simulate_stages
    from mindllm.dry_run.page import render_page
    from mindllm.parallel.stages import stages_of

    config = pipeline(4, 32, 16)
    simulated = simulate_stages(config, stages_of(config), FormulaSimulations())
    return written(directory / "memory.html", render_page(simulated, config, 2000 << 20, {}))


def extrapolated_memory(directory: Path) -> Path:
    """Memory of eight stages, extrapolated from smaller runs."""
    from dry_run_cases import FormulaSimulations, pipeline

    from mindllm.dry_run.forecast import forecast_stages
    from mindllm.dry_run.page import render_page
    from mindllm.parallel.stages import stages_of

    config = pipeline(8, 80, 64)
    forecast = forecast_stages(config, stages_of(config), FormulaSimulations())
    return written(directory / "memory_extrapolated.html", render_page(forecast, config, 2000 << 20, {}))


def schedule(directory: Path) -> Path:
    """The page of an even plan of four stages and sixteen micro-batches."""
    return drawn_plan(directory / "schedule.html", 16)


def drawn_plan(path: Path, micro_batches: int) -> Path:
    """The schedule of an even plan of four stages, as a page or a picture."""
    from mindllm.planning.problem import make_problem
    from mindllm.planning.reports.picture import draw_schedule
    from mindllm.planning.solve import even_split

    kinds = {"none": {"backward": 20.3, "activation_mb": 800}}
    layer = {"name": "decoder", "count": 32, "forward": 10.1, "parameter_mb": 900, "kinds": kinds}
    fields = {
        "stages": 4,
        "micro_batches": micro_batches,
        "limit_mb": 50_000,
        "point_to_point": 0.2,
        "layers": [layer],
        "head": {"forward": 1, "backward": 2, "memory_mb": 2000},
        "tail": {"forward": 8, "backward": 16, "memory_mb": 3000},
    }
    draw_schedule(even_split(make_problem(fields, "example")), path)
    return path


def strategies(directory: Path) -> Path:
    """Strategies that fit, and the YAML as it is."""
    from mindllm.config import load_config
    from mindllm.strategies.candidates import Candidate
    from mindllm.strategies.judge import Judged
    from mindllm.strategies.listing import list_strategies
    from mindllm.strategies.page import render_page
    from mindllm.strategies.search import evaluate_current
    from mindllm.timing.device import DEFAULT, read_device
    from mindllm.units import GIB

    config, device = load_config(ROOT / SEVENTY), read_device(DEFAULT)
    drawn = random.Random(0)
    judged = [
        Judged(
            Candidate(dp, tp, pp, 1, 1, 16, True, True), 400 * drawn.random() + 20 * pp, (drawn.uniform(20, 56) * GIB,)
        )
        for dp, tp, pp in (
            (1, 8, 8),
            (2, 4, 8),
            (4, 2, 8),
            (8, 1, 8),
            (2, 8, 4),
            (4, 4, 4),
            (8, 2, 4),
            (4, 8, 2),
            (8, 4, 2),
        )
    ]
    hand = evaluate_current(config, device)
    planned = replace(hand, candidate=judged[0].candidate, memory=judged[0].memory)
    page = render_page("llama2_70b: 64 devices", list_strategies(judged, [planned], hand, 58 * GIB), 58 * GIB)
    return written(directory / "strategies.html", page)


def graph(directory: Path) -> Path:
    """The graph of a small program, as MindSpore wrote it."""
    from mindllm.cli.inspect import main

    main(["graph", str(ROOT / "tests/compiled/samples/validate_2_7_0.ir"), "--output", str(directory / "graph.html")])
    return directory / "graph.html"


def wrong_answers(directory: Path) -> Path:
    """Wrong answers to questions with choices, long and short."""
    from mindllm.evaluate.report import render_page
    from mindllm.evaluate.run import Outcome

    passage = "The persimmon is an edible fruit that belongs to a genus of trees. " * 8
    samples = [
        {
            "doc_id": number,
            "target": number % 2,
            "arguments": [(f"{passage}\n\nQuestion {number}: is it a berry?", choice) for choice in (" no", " yes")],
            "filtered_resps": [(-3.0 - number, False), (-2.0, False)],
            "metrics": ["acc"],
            "acc": float(number % 2),
        }
        for number in range(6)
    ]
    outcome = Outcome(samples={"boolq": samples}, failures={"piqa": "hub/baber/piqa: no such data set"})
    return written(directory / "wrong_answers.html", render_page(outcome, "some/model"))


def recorded_run(directory: Path, name: str, seed: int, experts: bool = False) -> Path:
    """The output directory of a run of 200 steps, with held-out losses."""
    drawn, output = random.Random(seed), directory / name
    output.mkdir(parents=True, exist_ok=True)
    steps, evaluations = [], []
    for step in range(1, 201):
        loss = 3.2 + (5.6 + 0.5 * seed) * math.exp(-step / (40 + 20 * seed)) + drawn.gauss(0, 0.15)
        found = {"step": step, "loss": loss}
        if experts:
            loads = [[int(256 * drawn.uniform(0.2, 1.8)) for _ in range(8)] for _ in range(5)]
            found["experts"] = [{"layer": n, "tokens": load, "dropped": 90} for n, load in enumerate(loads)]
        steps.append(found)
        if step % 50 == 0:
            evaluations.append({"step": step, "loss": loss + 0.1, "unigram_loss": 6.9})
    for file, records in (("metrics.jsonl", steps), ("evaluation.jsonl", evaluations)):
        written(output / file, "".join(json.dumps(record) + "\n" for record in records))
    return output


def written(path: Path, text: str) -> Path:
    """The path, with the text."""
    path.write_text(text, encoding="utf-8")
    return path


def profile(directory: Path) -> Path:
    """A recorded step of eight ranks that is slower than predicted for several reasons."""
    from profile_maker import Maker, Plants, small_run

    from mindllm.cli.profile import main
    from mindllm.timing.configured import workload_of
    from mindllm.timing.device import DEFAULT, read_device
    from mindllm.timing.step import step_time

    yaml, keys, config = small_run()
    plants = Plants({"feed_forward.w2.matmul": 1.5}, exchanges={("AllReduce", "tp"): 2.0}, host=0.1, ranks={5: 1.2})
    recording = Maker(step_time(workload_of(config), read_device(DEFAULT)), plants).write(directory / "recording")
    main([yaml, str(recording), *keys, "--page", str(directory / "profile.html")])
    return directory / "profile.html"


def acceptance(directory: Path) -> Path:
    """Claims on devices: one confirmed, one with a slow link, one that failed, one that was not run."""
    from mindllm.accept.acceptance import Acceptance
    from mindllm.accept.archive import render_page
    from mindllm.accept.judge import Verdict, link_line, loss_line, peak_line, time_line, without

    lines = (
        loss_line("single", {8: 5.1}, {8: 5.1002}, 5e-3),
        peak_line("single", 2275 << 20, 2275 << 20, 2301 << 20),
        time_line("single", "step", 0.1151, 0.13, 0.1189),
        loss_line("dp", {8: 5.1}, {8: 5.1001}, 5e-3),
        link_line("dp", "AllReduce over dp", 17.6e9, 8.7e9),
        without("tp", Verdict.FAILED, "RunFailed, exit code 1, it said RuntimeError, EI0006"),
        without("pp", Verdict.NOT_RUN, "needs 4 devices, and 2 are here"),
    )
    found = Acceptance(
        "Ascend", 2, "Atlas 800T A2", ("single", "dp", "tp", "pp"), lines, [[("MindSpore", "good"), ("devices", "no")]],
        {"mindllm": "0.2.0", "CANN": ""}, {}, {"single": 61.2, "dp": 80.0},
    )  # fmt: skip
    return written(directory / "acceptance.html", render_page(found))


PAGES: Mapping[str, Callable[[Path], Path]] = {
    "acceptance": acceptance,
    "proof": proof,
    "memory": memory,
    "extrapolated_memory": extrapolated_memory,
    "schedule": schedule,
    "strategies": strategies,
    "graph": graph,
    "profile": profile,
    "wrong_answers": wrong_answers,
}


def pictures(directory: Path) -> None:
    """The pictures that are no pages: loss curves of two runs, tokens of experts, a short and a long schedule."""
    from mindllm.train.curves import draw, draw_experts, read_run

    runs = [
        read_run(recorded_run(directory, name, seed)) for seed, name in enumerate(("llama2_tiny", "llama2_tiny_lr3"))
    ]
    draw(runs, directory / "loss_curve.png")
    draw_experts(read_run(recorded_run(directory, "mixture", 0, experts=True)), directory / "experts.png")
    drawn_plan(directory / "schedule.png", 16)
    drawn_plan(directory / "schedule_long.png", 400)


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    for make in PAGES.values():
        make(target)
    pictures(target)
