"""Whatever a file of somebody else holds, it is read or refused as a mistake of the user: trees with odd values, damaged bytes.

Longer, with other inputs: ``HYPOTHESIS_PROFILE=search python -m pytest tests/test_outside_fuzz.py``.
"""

import copy
import csv
import gzip
import io
import json
import math
import os
import shutil
from collections import Counter
from contextlib import suppress
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from mindllm.cli.time import read_measured
from mindllm.compiled.inspect.source import read_graph
from mindllm.config import override_config, render_config
from mindllm.config.reading.load import read_document
from mindllm.data.tokenizers.sentencepiece_tokenizer import train_byte_level_bpe
from mindllm.data.tokenizers.special_tokens import read_special_tokens
from mindllm.data.tokenizers.tokenizer import load_tokenizer
from mindllm.errors import CheckFailed, RunFailed, UserError
from mindllm.evaluate.answers import Answers
from mindllm.families.hugging_face import quantization_in, read_model_config
from mindllm.planning.read_problem import Setting, read_problem
from mindllm.programs.kept import kept_ranks, kept_stages
from mindllm.programs.lockstep import read_rank
from mindllm.prove.against import compare
from mindllm.prove.answers import Answer, Standing, Table
from mindllm.prove.found import read_proof
from mindllm.prove.questions import CHECKPOINTS, COMMUNICATION, DATA, MEMORY, PARITY, STEP_TIME
from mindllm.strategies.candidates import candidates
from mindllm.strategies.search import FILE, _read_judgements, search
from mindllm.timing.device import DEFAULT, read_device
from mindllm.timing.measured.kernel_file import PARTS, profiled_step, read_kernels
from mindllm.train.checkpoint.manifest import FileEntry, Manifest, _digest, read_manifest
from mindllm.train.checkpoint.tensors import read_tensors, stored_tensors, write_tensors
from mindllm.weight_files.hugging_face import read_tensor_file
from tests.prove.made_proofs import SHORTAGE, figures, proof

TESTS = Path(__file__).parent
KEPT = TESTS / "kept_programs"
TIMED = read_device(DEFAULT)
GROUND_TRUTH = TESTS / "ground_truth"
LONGEST_MESSAGE = 20_000
ODD = [
    None, True, False, -1, 0, 1, 2, 3.5, 1e308, float("inf"), float("nan"), 10**18, 10**30, -(2**70), "", "x", "7", "x" * 5000,
    "{{data}}", "../../x", "\u202e", "a\nb", [], {}, [[]], [None], ["x", 1], {"x": {"y": []}}, [0] * 500, ".".join("a" * 3000),
]  # fmt: skip
QUICK = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None)
deep = [[]]
for _ in range(150):
    deep = [deep]


def places(tree, path=()):
    """The path of every value in a tree."""
    yield path
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        yield from places(value, (*path, key))


@st.composite
def mutated(draw, tree):
    """``tree`` with up to three values replaced, removed, or given an odd neighbour."""
    tree = copy.deepcopy(tree)
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from([path for path in places(tree) if path] or [()]))
        if not path:
            return draw(st.sampled_from(ODD))
        around = tree
        for key in path[:-1]:
            around = around[key]
        odd = copy.deepcopy(draw(st.sampled_from([*ODD, deep])))
        match draw(st.sampled_from(["replace", "replace", "remove", "add", "twice"])):
            case "replace":
                around[path[-1]] = odd
            case "remove":
                del around[path[-1]]
            case "add" if isinstance(around, dict):
                around[draw(st.sampled_from(["", "x", "a.b.c", "name", "{{data}}"]))] = odd
            case _ if isinstance(around, list):
                around.append(odd)
    return tree


@st.composite
def damaged(draw, content):
    """Bytes with some of them changed, cut off, or in the file twice."""
    content = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(content) - 1)))
        match draw(st.sampled_from(["flip", "flip", "flip", "cut", "insert", "zeros"])):
            case "flip" if content:
                content[at] ^= 1 << draw(st.integers(0, 7))
            case "cut":
                del content[at : at + draw(st.integers(1, 64))]
            case "insert":
                content[at:at] = draw(st.binary(max_size=8))
            case _:
                content[at : at + 8] = bytes(8)
    return bytes(content)


def refused_or(read, *arguments):
    """What is read; None for a mistake that is told in a message of bounded length."""
    with suppress(UserError, RunFailed, CheckFailed, OSError):
        try:
            return read(*arguments)
        except Exception as error:
            assert len(str(error)) < LONGEST_MESSAGE  # noqa: PT017 (whatever else it is, it goes on)
            raise
    return None


def write_json(path, tree):
    path.write_text(json.dumps(tree), encoding="utf-8")
    return path


PROBLEM = {
    "name": "p", "stages": 2, "chunks": 1, "micro_batches": 4, "schedule": "1f1b", "limit_mb": [100.0, 90.0], "static_mb": 1,
    "layers": [{
        "name": "body", "count": 4, "forward": 1.0, "weight_gradient": 0.5, "parameter_mb": 2.0,
        "kinds": {"none": {"backward": 2.0, "activation_mb": 3.0}, "full": {"backward": 3.0, "activation_mb": 0.1}},
    }],
    "head": {"forward": 1}, "tail": {"forward": 1, "backward": 2},
    "recompute_kinds": {"none": {}, "full": {"recompute": True}},
}  # fmt: skip
INSTANCES = json.loads((GROUND_TRUTH / "planner_instances.json").read_text())
INSTANCES["instances"] = INSTANCES["instances"][:1]
LAYER_FILE = json.loads((GROUND_TRUTH / "sapp_test_96_layers.json").read_text())


@QUICK
@given(tree=st.one_of(mutated(PROBLEM), mutated(INSTANCES), mutated(LAYER_FILE)))
def test_problems(tree, tmp_path):
    refused_or(read_problem, write_json(tmp_path / "problem.json", tree))
    refused_or(read_problem, tmp_path / "problem.json", Setting(stages=2, micro_batches=4), "x")


@pytest.mark.parametrize("stages", [1, 0, -3])
def test_an_instance_of_fewer_than_two_stages(stages, tmp_path):
    """Found by a search of a thousand inputs."""
    (instance,) = INSTANCES["instances"]
    path = write_json(tmp_path / "problem.json", {**INSTANCES, "instances": [{**instance, "pipeline_stage": stages}]})
    with pytest.raises(UserError, match="pipeline_stage: such an instance has a first and a last stage"):
        read_problem(path)


MODEL = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 64},
    "eos_token_id": [1, 2], "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip
QUANTIZED = [
    {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False, "modules_to_not_convert": ["lm_head"]},
    {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm"},
    {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "llm_int8_skip_modules": ["x"],
    },
    {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
    {"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4, "group_size": 64, "axis": 1}}},
]


@QUICK
@example(tree={**MODEL, "rope_scaling": {"rope_type": []}})
@given(tree=st.one_of(mutated(MODEL), *(mutated({**MODEL, "quantization_config": each}) for each in QUANTIZED)))
def test_models_of_hugging_face(tree, tmp_path):
    write_json(tmp_path / "config.json", tree)
    refused_or(read_model_config, tmp_path)
    refused_or(quantization_in, tmp_path)


MANIFEST = json.loads(Manifest(3, (FileEntry("a", "weights", 1, "0"), FileEntry("b", "state", 2, "1"))).render())
MANIFEST.pop("manifest_sha256")


@QUICK
@given(tree=mutated(MANIFEST), sealed=st.booleans())
def test_manifests(tree, sealed, tmp_path):
    if sealed and isinstance(tree, dict):
        tree["manifest_sha256"] = _digest(tree)
    write_json(tmp_path / "manifest.json", tree)
    if found := refused_or(read_manifest, tmp_path):
        assert type(found.step) is int
        assert all(type(file.size) is int and "/" not in file.name for file in found.files)


def table(rows):
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0])
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


KERNEL = {
    "Type": "MatMulV3", "Accelerator Core": "AI_CORE", "Duration(us)": "7.5", "Input Shapes": "8,16;16,4",
    "Input Data Types": "DT_BF16;DT_BF16", "Output Shapes": "8,4", "Output Data Types": "DT_BF16", "Input Formats": "ND",
}  # fmt: skip
ADD = {**KERNEL, "Type": "Add", "Accelerator Core": "AIV", "Input Shapes": "64;64", "Output Shapes": "64"}
ATTENTION = {**KERNEL, "Type": "FlashAttentionScore", "Input Shapes": "1,2,8,4;1,2,8,4", "Output Shapes": "1,2,8,4"}
CELLS = [
    "inf", "nan", "-1", "1e400", "1e308", "0", "", '"', "1,000", "9" * 5000, "1" + "0" * 18, "1" + "0" * 18 + ",4;4,4",
    "-3,4;4,5", ";", "\u0663",
]  # fmt: skip


@QUICK
@given(data=st.data())
def test_profiles(data, tmp_path):
    rows = [dict(row) for row in (KERNEL, ADD, ATTENTION)]
    for _ in range(data.draw(st.integers(0, 3))):
        data.draw(st.sampled_from(rows))[data.draw(st.sampled_from(list(KERNEL)))] = data.draw(st.sampled_from(CELLS))
    content = table(rows)
    path = tmp_path / "kernel_details.csv"
    path.write_bytes(data.draw(st.just(content) | damaged(content)))
    refused_or(read_kernels, path)
    steps = [dict.fromkeys(PARTS, "5"), dict.fromkeys(PARTS, "6")]
    steps[data.draw(st.integers(0, 1))][data.draw(st.sampled_from(PARTS))] = data.draw(st.sampled_from(CELLS))
    content = table(steps)
    path.write_bytes(data.draw(st.just(content) | damaged(content)))
    refused_or(profiled_step, path)
    refused_or(read_measured, path)


DEVICE = Path(read_device.__code__.co_filename).parent / "devices"


@QUICK
@given(data=st.data())
def test_devices_and_runs(data, small_run_text, tmp_path):
    content = data.draw(
        st.sampled_from([*(path.read_bytes() for path in sorted(DEVICE.glob("*.yaml"))), small_run_text])
    )
    path = tmp_path / "any.yaml"
    path.write_bytes(data.draw(damaged(content)))
    refused_or(read_device, str(path))
    refused_or(read_document, path)


@pytest.fixture(scope="module")
def small_run_text():
    from mindllm.config import load_config

    return render_config(load_config(TESTS.parent / "configs" / "llama2" / "pretrain_llama2_tiny.yaml")).encode()


@pytest.mark.parametrize(
    "key", ["a" + ".a" * 5000, "." * 5000, "model." * 3000 + "x", "x" * 100_000, "callbacks" + ".0" * 3000]
)
def test_options_with_thousands_of_dots(key, small_run):
    for overrides in ([f"--{key}=1"], {key: 1}, {key: deep}, [f"--{key}={'x' * 100_000}"]):
        with pytest.raises(UserError) as refused:
            override_config(small_run, overrides)
        assert len(str(refused.value)) < LONGEST_MESSAGE


@pytest.fixture(scope="module")
def small_run():
    from mindllm.config import load_config

    return load_config(TESTS.parent / "configs" / "llama2" / "pretrain_llama2_tiny.yaml")


SIMULATION = json.loads(gzip.decompress(next(KEPT.glob("*/rank_*/simulation.json.gz")).read_bytes()))
SIMULATION = {
    key: {name: column[:3] for name, column in value.items()} if isinstance(value, dict) else value
    for key, value in SIMULATION.items()
}


@QUICK
@given(data=st.data())
def test_simulations(data, tmp_path):
    directory = tmp_path / "rank_0"
    directory.mkdir(exist_ok=True)
    content = gzip.compress(json.dumps(data.draw(mutated(SIMULATION))).encode(), 1)
    (directory / "simulation.json.gz").write_bytes(data.draw(st.just(content) | damaged(content)))
    refused_or(kept_stages, tmp_path)
    (rank,) = kept_ranks(tmp_path)
    if simulation := refused_or(lambda: rank.simulation):
        simulation.lines()
        if simulation.blocks:
            simulation.peak_by_category()


@QUICK
@given(data=st.data())
def test_kept_programs(data, tmp_path):
    directory = tmp_path / "rank_0"
    directory.mkdir(exist_ok=True)
    source = KEPT / "mlp_single" / "rank_0"
    for name in ("training.mindir", "parameters.json"):
        (directory / name).write_bytes(gzip.decompress((source / f"{name}.gz").read_bytes()))
    shutil.copy(source / "simulation.json.gz", directory)
    graph, parameters = (
        (directory / "training.mindir").read_bytes(),
        json.loads((directory / "parameters.json").read_bytes()),
    )
    which = data.draw(st.sampled_from(["graph", "parameters"]))
    (directory / "training.mindir").write_bytes(data.draw(damaged(graph)) if which == "graph" else graph)
    write_json(directory / "parameters.json", data.draw(mutated(parameters)) if which == "parameters" else parameters)
    (rank,) = kept_ranks(tmp_path)
    refused_or(read_rank, rank)
    refused_or(read_graph, directory / "training.mindir")


TOKENIZER = {
    "tokenizer_config.json": {
        "bos_token": "<s>", "eos_token": {"content": "</s>"}, "add_bos_token": True, "tokenizer_class": "LlamaTokenizer",
        "added_tokens_decoder": {"0": {"content": "<s>", "special": True}}, "chat_template": "{{ messages }}",
        "additional_special_tokens": ["<x>"],
    },
    "special_tokens_map.json": {"pad_token": "<pad>", "additional_special_tokens": ["<y>"]},
    "added_tokens.json": {"<z>": 63},
    "generation_config.json": {"eos_token_id": [1, 2], "pad_token_id": 0},
}  # fmt: skip


@QUICK
@given(data=st.data())
def test_special_tokens(data, tmp_path):
    for name, tree in TOKENIZER.items():
        write_json(tmp_path / name, data.draw(st.just(tree) | mutated(tree)))
    refused_or(read_special_tokens, tmp_path)


@pytest.fixture(scope="module")
def small_tokenizer():
    return json.loads(train_byte_level_bpe(["ab abc abcd"], 258).to_str())


@QUICK
@given(data=st.data())
def test_tokenizers(data, small_tokenizer, tmp_path):
    split = {"type": "Split", "pattern": {"Regex": "a+"}, "behavior": "Isolated", "invert": False}
    tree = {**small_tokenizer, "pre_tokenizer": split}
    small = {**tree, "model": {**tree["model"], "vocab": {"a": 0}, "merges": []}}
    content = json.dumps(data.draw(mutated(tree) | mutated(small)))
    (tmp_path / "tokenizer.json").write_text(content)
    if tokenizer := refused_or(load_tokenizer, tmp_path):
        refused_or(tokenizer.encode, "aab </s>")


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "AAAA"}, "not a tokenizer.json"),
        (
            "pre_tokenizer",
            {"type": "Split", "pattern": {"Regex": "(a+)+b"}, "behavior": "Isolated", "invert": False},
            "on a short text its steps fail",
        ),
    ],
)
def test_what_the_library_of_tokenizers_panics_on(key, value, said, small_tokenizer, tmp_path):
    write_json(tmp_path / "tokenizer.json", {**small_tokenizer, key: value})
    with pytest.raises(UserError, match=said):
        load_tokenizer(tmp_path).encode("a" * 60)


def test_a_token_for_what_is_unknown_that_the_vocabulary_lacks(small_tokenizer, tmp_path):
    """Found by a search of a thousand inputs: the library raises a plain Exception where it meets something unknown."""
    model = {**small_tokenizer["model"], "unk_token": "<missing>"}
    write_json(tmp_path / "tokenizer.json", {**small_tokenizer, "model": model, "pre_tokenizer": None})
    with pytest.raises(UserError, match=r"cannot encode a text .*<missing>"):
        load_tokenizer(tmp_path).encode("a b")


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    path = tmp_path_factory.mktemp("tensors") / "x.safetensors"
    tensors = {"a": np.ones((2, 3), np.float32), "b": np.ones(4, ml_dtypes.bfloat16)}
    with open(path, "wb") as file:
        write_tensors(file, tensors=tensors, framework="pt", metadata={"x": "y"})
    return path.read_bytes()


@QUICK
@given(data=st.data())
def test_tensors(data, stored, tmp_path):
    path = tmp_path / "x.safetensors"
    header = json.loads(stored[8 : 8 + int.from_bytes(stored[:8], "little")])
    odd = json.dumps(data.draw(mutated(header))).encode()
    path.write_bytes(data.draw(damaged(stored) | st.just(len(odd).to_bytes(8, "little") + odd + bytes(64))))
    for read in (stored_tensors, read_tensors):
        with suppress(ValueError, OSError):
            for tensor in read(path).values():
                np.asarray(tensor)
    refused_or(read_tensor_file, path)


KEPT_PROOF = proof(
    {
        PARITY: Standing.REFUTED,
        DATA: Answer(DATA, Standing.NOT_PROVED, "no", (SHORTAGE,), ("a",), (Table("t", ("c",), (("1",),)),)),
    }
).to_dict()
KEPT_PROOF["answers"] = [
    {**answer, "pages": [{"title": "a", "file": "a.html", "text": ""}]} for answer in KEPT_PROOF["answers"]
]


@QUICK
@given(data=st.data())
def test_proofs(data, tmp_path):
    """What is read as a proof can be compared with another one in both directions, shown and written."""
    content = json.dumps(data.draw(mutated(KEPT_PROOF))).encode()
    path = tmp_path / "proof.json"
    path.write_bytes(data.draw(st.just(content) | damaged(content)))
    if found := refused_or(read_proof, path):
        for earlier, later in ((found, proof()), (proof(), found)):
            comparison = compare(earlier, later)
            assert str(comparison)
            assert json.dumps(comparison.to_dict(), allow_nan=False)
            comparison.worse_by(0.01)
        assert str(found)


@pytest.mark.parametrize("figure", ["x", None, [], 10**400, 1e300, "Infinity", True])
@pytest.mark.parametrize("question", [MEMORY, STEP_TIME, COMMUNICATION, CHECKPOINTS])
def test_figures_of_a_proof_are_numbers(question, figure, tmp_path):
    known = figures()
    key = next(iter(known[question]))
    known[question] = {**known[question], key: figure}
    with pytest.raises(UserError, match=r"not a proof of mindllm|not JSON"):
        read_proof(write_json(tmp_path / "proof.json", proof(known=known).to_dict()))


ANSWERS = ["0" * 32, [-1.5, True]], ["1" * 32, "a text"]


@QUICK
@given(data=st.data())
def test_kept_answers(data, tmp_path):
    """Answers that an interrupted evaluation left."""
    lines = b"".join(json.dumps(data.draw(mutated([*each]) | st.just([*each]))).encode() + b"\n" for each in ANSWERS)
    (tmp_path / "rank_0.jsonl").write_bytes(data.draw(st.just(lines) | damaged(lines)))
    if answers := refused_or(Answers, tmp_path):
        for answer in answers._known.values():
            assert isinstance(answer, str) or (float(answer[0]), bool(answer[1]))


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    """A small run, and the lines that its search left."""
    from mindllm.config import load_config

    run = load_config(TESTS.parent / "configs" / "llama2" / "pretrain_llama2_tiny.yaml")
    directory = tmp_path_factory.mktemp("searched")
    search(run, 2, 4, TIMED, TIMED.memory_size.value, directory)
    return run, (directory / FILE).read_bytes().splitlines(keepends=True)


@QUICK
@given(data=st.data())
def test_candidates(data, searched, tmp_path):
    """A search goes on from whatever is left of an earlier one, and comes to the same strategies."""
    run, lines = searched
    kept = data.draw(st.lists(st.sampled_from(lines), min_size=1, max_size=4, unique=True))
    trees = [json.dumps(data.draw(mutated(json.loads(line)))).encode() + b"\n" for line in kept]
    path = tmp_path / FILE
    path.write_bytes(data.draw(st.just(b"".join(trees)) | damaged(b"".join(kept)) | st.binary(max_size=60)))
    wanted = {one.name: one for one in candidates(run, 2, 4, TIMED, Counter())}
    for name, judged in (refused_or(_read_judgements, path, json.loads(lines[0])["run"], wanted) or {}).items():
        if judged is not None:
            assert judged.candidate == wanted[name]
            assert 0 <= judged.speed < math.inf
            assert len(judged.memory) == judged.candidate.pipeline_stage


LOST = [
    b"[]", b"{}", b"5", b"null", b"true", b'"x"', b"\xff\xfe", bytes(4096), b"[[[", b"NaN", b'{"run": 1}', b'{"run": "x"}',
    b'{"run": "KEY", "name": "x", "judged": 5}', b'{"run": "KEY", "name": ["x"], "judged": null}',
    b'{"run": "KEY", "name": "x", "judged": {"candidate": {}}}', b"[" * 100_000, b"9" * 10_000,
]  # fmt: skip


def test_lines_of_a_search_that_a_crash_has_damaged(searched, tmp_path, caplog):
    """Each once ended every later search with a traceback."""
    run, lines = searched
    key = json.loads(lines[0])["run"].encode()
    whole = search(run, 2, 4, TIMED, TIMED.memory_size.value)
    lost = [line.replace(b"KEY", key) for line in LOST]
    cut = lines[-1][:50]
    (tmp_path / FILE).write_bytes(b"\n".join(lost) + b"\n" + b"".join(lines[:-1]) + cut)
    again = search(run, 2, 4, TIMED, TIMED.memory_size.value, tmp_path)
    assert (again.judged, again.reused) == (whole.judged, whole.tried - 1)
    assert f"{FILE}: ignored {len(LOST) + 1} damaged lines (first: line 1)" in caplog.text
    assert (tmp_path / FILE).read_bytes().endswith(cut + b"\n" + lines[-1])
    last = search(run, 2, 4, TIMED, TIMED.memory_size.value, tmp_path)
    assert (last.judged, last.reused) == (whole.judged, whole.tried)


def test_speed_under_the_name_of_another_candidate_is_not_taken(searched, tmp_path):
    run, lines = searched
    first, second = map(json.loads, lines[:2])
    forged = {**first, "judged": second["judged"] or {**first["judged"], "memory": []}}
    (tmp_path / FILE).write_bytes(json.dumps(forged).encode() + b"\n" + lines[1])
    assert search(run, 2, 4, TIMED, TIMED.memory_size.value, tmp_path).reused == 1


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda path: path.write_text("# Notes\nof mine\n")])
def test_another_file_in_the_place_of_candidates_is_refused_and_stays(make, searched, tmp_path):
    make(tmp_path / FILE)
    with pytest.raises(UserError, match=FILE):
        search(searched[0], 2, 4, TIMED, TIMED.memory_size.value, tmp_path)
    assert not (tmp_path / FILE).is_file() or (tmp_path / FILE).read_text() == "# Notes\nof mine\n"
