"""Plans of a run YAML whose costs come from formulas: mixtures, a layer that predicts ahead, several chunks."""

import json
from pathlib import Path

import pytest

from mindllm.command import run_command
from mindllm.config import load_config
from mindllm.parallel.layer_plan import make_plan
from mindllm.timing.configured import workload_of
from mindllm.timing.memory import stage_bytes
from toolkit.pipeline_balance.__main__ import main

CONFIGS = Path(__file__).parents[2] / "configs"
GB = 1 << 30
OFFSET = "--model.model_config.offset=[0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"
ALONE = ["--parallel_config={pipeline_stage: 1, micro_batch_num: 1}", "--model.model_config.offset=0"]


def planned(capsys, *arguments):
    main([*map(str, arguments), "--formula", "--seconds", "20", "--json"])
    return json.loads(capsys.readouterr().out)


def test_deepseek_v3_is_planned_with_the_layer_that_predicts_ahead_on_the_last_stage(tmp_path, capsys):
    output = tmp_path / "planned.yaml"
    source = CONFIGS / "deepseek/pretrain_deepseek_v3_671b.yaml"
    main(["--config", str(source), "--formula", "--seconds", "20", "--apply", "--output", str(output)])
    assert "lower bound of all plans" in capsys.readouterr().out
    config = load_config(output)
    plan = make_plan(config)
    assert len(plan.layers) == 62  # 3 dense, 58 with experts, 1 that predicts ahead
    assert plan.layers[-1].stage == 15
    assert max(stage_bytes(workload_of(config))) <= float(config.context.max_device_memory.removesuffix("GB")) * GB


def test_the_fastest_number_of_chunks_is_taken(capsys):
    source = CONFIGS / "llama2/pretrain_llama2_13b_16p.yaml"
    one = planned(capsys, "--config", source)
    best = planned(capsys, "--config", source, "--interleave", "1", "2")
    assert best["step_time"] < one["step_time"]
    assert len(best["offset"]) == 2


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--problem", "problem.json", "--formula"], "--formula: does not go with no --config"),
        (["--config", "CONFIG", "--formula", "--validate"], "--formula: does not go with --validate"),
        (
            ["--config", "CONFIG", "--formula", "--model.model_config.num_nextn_predict_layers=2", OFFSET],
            "num_nextn_predict_layers: all of them have to be on the last stage",
        ),
        (
            ["--config", "CONFIG", "--formula", *ALONE],
            "pipeline_stage: is 1: there is no pipeline to plan",
        ),
    ],
)
def test_what_cannot_be_planned_by_formula_is_refused(arguments, expected, capsys):
    source = str(CONFIGS / "deepseek/pretrain_deepseek_v3_671b.yaml")
    with pytest.raises(SystemExit) as ended:
        run_command(main, [source if argument == "CONFIG" else argument for argument in arguments])
    assert ended.value.code == 2
    assert expected in capsys.readouterr().err
