"""The schemas for editors: what loads is valid, what the loader refuses is marked, the committed file is what is printed."""

import copy
import json
import re
from pathlib import Path

import pytest
from jsonschema import Draft7Validator

import mindllm
from mindllm.cli.schema import main
from mindllm.config import load_config
from mindllm.config.editor import run_schema
from mindllm.config.reading.load import SYNONYMS, read_file, tree_of
from mindllm.config.reading.schema import sections_in, walk
from mindllm.config.reading.yaml_tree import read_yaml
from mindllm.config.run import RunConfig
from mindllm.errors import UserError
from mindllm.mindformers.reader import KEYS
from mindllm.mindformers.schema import mindformers_schema
from tests.mindformers.mindformers_files import LEGACY

ROOT = Path(__file__).parents[2]
SHIPPED = sorted((ROOT / "configs").rglob("*.yaml"))
FORMS = sorted((ROOT / "mindllm" / "verify" / "forms").rglob("*.yaml"))
TINY = ROOT / "configs" / "llama2" / "pretrain_llama2_tiny.yaml"
MODELINE = re.compile(r"^# yaml-language-server: \$schema=(\S+)$", re.MULTILINE)


@pytest.fixture(scope="module")
def ours():
    schema = run_schema(mindllm.__version__)
    Draft7Validator.check_schema(schema)
    return Draft7Validator(schema)


@pytest.fixture(scope="module")
def theirs():
    schema = mindformers_schema(mindllm.__version__)
    Draft7Validator.check_schema(schema)
    return Draft7Validator(schema)


def marked(validator, data):
    """The paths of what an editor marks."""
    return sorted({error.json_path for error in validator.iter_errors(data)})


def test_the_committed_schema_is_what_the_command_prints(capsys):
    assert main([]) == 0
    assert capsys.readouterr().out == (ROOT / "configs" / "run.schema.json").read_text(encoding="utf-8")


def test_the_command_writes_a_file(tmp_path, capsys):
    assert main(["--mindformers", "-o", str(tmp_path / "theirs.json")]) == 0
    assert json.loads((tmp_path / "theirs.json").read_text())["$id"] == "urn:mindllm:mindformers"
    assert "wrote" in capsys.readouterr().out


def test_every_shipped_yaml_is_valid_as_it_is_written(ours):
    assert len(SHIPPED) > 100
    assert {path.name: marked(ours, read_file(path).data) for path in [*SHIPPED, *FORMS]} == {
        path.name: [] for path in [*SHIPPED, *FORMS]
    }


def test_every_shipped_yaml_names_the_schema():
    for path in SHIPPED:
        named = MODELINE.findall(path.read_text())
        assert [(path.parent / name).resolve() for name in named] == [ROOT / "configs" / "run.schema.json"], path


@pytest.mark.parametrize("path", [TINY, *FORMS[:4]], ids=lambda path: path.stem)
def test_a_resolved_run_is_valid(path, ours):
    assert marked(ours, json.loads(json.dumps(tree_of(load_config(path))))) == []


WRONG = {
    "runn_mode: train": "$",
    "run_mode: trian": "$.run_mode",
    "seed: '4'": "$.seed",
    "seed: -1": "$.seed",
    "base: 3": "$.base",
    "use_parallel: 1": "$.use_parallel",
    "parallel_config: {data_parallel: 0}": "$.parallel_config.data_parallel",
    "parallel_config: {data_paralel: 2}": "$.parallel_config",
    "parallel: {parallel_mode: automatic}": "$.parallel.parallel_mode",
    "train_dataset: {data_loader: {type: MindDataset, config: {packing: true}}}": "$.train_dataset.data_loader.config",
    "train_dataset: {data_loader: {type: Mind}}": "$.train_dataset.data_loader.type",
    "callbacks: [{type: CheckpointMonitor, save_checkpoint_steps: often}]": "$.callbacks[0].save_checkpoint_steps",
    "callbacks: [{type: NaNMonitor, save_checkpoint_steps: 4}]": "$.callbacks[0]",
    "callbacks: [{save_checkpoint_steps: 4}]": "$.callbacks[0]",
    "model: {model_config: {offset: []}}": "$.model.model_config.offset",
    "model: {model_config: {rope_scaling: {rope_type: yarn, low_freq_factor: 1}}}": "$.model.model_config.rope_scaling",
    "recompute_config: {select_recompute: [a, 3]}": "$.recompute_config.select_recompute",
    "swap_config: {op_swap: {layers: [0]}}": "$.swap_config.op_swap",
    "runner_wrapper: {scale_sense: {type: Fixed}}": "$.runner_wrapper.scale_sense",
    "lr_schedule: {typ: ConstantWarmUpLR}": "$.lr_schedule",
    "model: {model_config: {ffn_hidden_size: 12}}": "$.model.model_config.ffn_hidden_size",
    "moe_config: {expert_num: 4}": "$.moe_config",
}


@pytest.mark.parametrize("text", WRONG)
def test_what_the_loader_refuses_is_marked(text, ours):
    """At the section, where the wrong key is one of several forms of it; the loader names each key."""
    over_tiny = {"base": str(TINY), **read_yaml(text, "run.yaml").data}
    with pytest.raises(UserError):
        load_config(over_tiny)
    assert marked(ours, read_yaml(text, "run.yaml").data) == [WRONG[text]]


RIGHT = (
    "processor:",
    "parallel: {parallel_mode: SEMI_AUTO_PARALLEL, pipeline_config: }",
    "lr_schedule: {learning_rate: 1e-4}",
    "runner_wrapper: {scale_sense: {type: FixedLossScaleUpdateCell, loss_scale_value: 8}}",
    "model: {model_config: {offset: [[0, 0], [0, 0]], num_hidden_layers: 4, quantized_base: keep}}",
    "model: {model_config: {rope_scaling: {rope_type: linear, factor: 2}, pet_config: {pet_type: adapter}}}",
    "recompute_config: {recompute: [1, true], select_recompute: {'feed_forward.w1': [[1], [2]]}}",
    "swap_config: {op_swap: {op_name: 'attention', layers: [0]}, layer_swap: [{layers: true}]}",
    "train_dataset: {data_loader: {config: {split: '95,5', packing: joined}}}",
)


@pytest.mark.parametrize("text", RIGHT)
def test_every_form_of_a_value_is_valid(text, ours):
    assert marked(ours, read_yaml(text, "run.yaml").data) == []


def test_every_key_is_described_and_every_key_misspelt_is_marked(ours):
    schema = ours.schema
    sections = {section.__name__ for _, info, _ in walk(RunConfig) for section in sections_in(info.annotation)}
    assert sections == {*schema["definitions"]}
    for name, section in [("", schema), *schema["definitions"].items()]:
        assert section["additionalProperties"] is False, name
        for key, value in section["properties"].items():
            assert value.get("description") or value.get("deprecationMessage"), f"{name}.{key}"
    names = schema["definitions"]["ModelConfig"]["properties"]
    assert {*SYNONYMS[("model", "model_config")]} <= {*names}


def test_keys_of_mindformers_say_what_to_write(ours):
    keys = ours.schema["definitions"]["ModelConfig"]["properties"]
    assert keys["ffn_hidden_size"]["deprecationMessage"] == "write model.model_config.intermediate_size"
    assert keys["qkv_concat"]["deprecationMessage"].startswith("remove it: ")


def test_a_yaml_of_mindformers_is_valid_and_what_is_refused_is_marked(theirs):
    assert marked(theirs, LEGACY) == []
    spoilt = copy.deepcopy(LEGACY)
    spoilt["layer_scale"] = True
    spoilt["model"]["model_config"]["hiden_size"] = 4
    spoilt["context"]["device_id"] = "0"
    spoilt["monitor_config"] = {"anything": 1}
    spoilt["tensorboard"] = {"anything": 1}
    wrong = ["$.context.device_id", "$.layer_scale", "$.model.model_config", "$.monitor_config"]
    assert marked(theirs, spoilt) == wrong


def test_every_key_of_mindformers_says_what_becomes_of_it(theirs):
    for key, rule in KEYS.items():
        node = theirs.schema
        for part in key.split("."):
            node = node["items"] if part == "[]" else node if part == "*" else node.get("properties", {}).get(part, {})
        if key.endswith(".*") and key.removesuffix(".*") in KEYS:
            continue  # said of the section itself
        assert node["description"].startswith(rule.outcome.value.capitalize()), key
