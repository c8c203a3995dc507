"""GGUF files: weights and architecture are those of the model they were made of, as transformers reads them, and as gguf does."""

import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mindllm.config import load_config, read_model_config
from mindllm.data.tokenizers.tokenizer import load_tokenizer
from mindllm.errors import UserError
from mindllm.gguf import TYPES, llama3_divisors, read_header
from mindllm.gguf import header as gguf_header
from mindllm.weight_files import read_hugging_face
from mindllm.weight_files.hugging_face import read_tensor_file

gguf = pytest.importorskip("gguf")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from hugging_face import random_llama  # noqa: E402
from tiny_gguf import add_tensor, finish, write_gguf  # noqa: E402

SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "head_dim": 16,
    "pad_token_id": None,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
MODELS = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 128}),
    "gemma": ("Gemma", {}),
    "gemma2": ("Gemma2", {"query_pre_attn_scalar": 16, "sliding_window": 32}),
    "gemma3": ("Gemma3Text", {"query_pre_attn_scalar": 16, "sliding_window": 32, "num_hidden_layers": 7}),
    "qwen3moe": ("Qwen3Moe", {"moe_intermediate_size": 32, **EXPERTS, "norm_topk_prob": True}),
    "qwen2moe": ("Qwen2Moe", {"moe_intermediate_size": 32, **EXPERTS, "shared_expert_intermediate_size": 48}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}
SPARSE = {"add_expert_count": 4, "add_expert_used_count": 2}
MORE = {
    "gemma2": {"add_sliding_window": 32},
    "gemma3": {"add_sliding_window": 32},
    "qwen3moe": {**SPARSE, "add_expert_feed_forward_length": 32},
    "qwen2moe": {**SPARSE, "add_expert_feed_forward_length": 32, "add_expert_shared_feed_forward_length": 48},
    "mixtral": SPARSE,
}
CODES = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "TQ1_0", "TQ2_0", "MXFP4")
K_CODES = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "IQ2_XXS", "IQ2_XS", "IQ3_XXS")
K_CODES += ("IQ1_S", "IQ3_S", "IQ2_S", "IQ1_M")


def model_of(architecture, **changes):
    name, own = MODELS[architecture]
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **own, **changes})
    torch.manual_seed(0)
    network = "Gemma3ForCausalLM" if name == "Gemma3Text" else f"{name}ForCausalLM"
    model = getattr(transformers, network)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.3)
    return model


@pytest.mark.parametrize("architecture", MODELS)
def test_a_file_is_the_directory_of_its_model(architecture, tmp_path):
    """The same architecture and weights as the directory that transformers writes of the model the file was made of."""
    model = model_of(architecture)
    of_llama_cpp = "llama" if architecture == "mixtral" else architecture
    file = write_gguf(tmp_path / "model.gguf", model, of_llama_cpp, more=MORE.get(architecture))
    model.save_pretrained(tmp_path / "directory")
    ours, theirs = read_model_config(file), read_model_config(tmp_path / "directory")
    assert ours.architecture == theirs.architecture
    assert (ours.model_type, ours.max_position_embedding) == (theirs.model_type, theirs.max_position_embedding)
    wanted = read_hugging_face(tmp_path / "directory", theirs)
    for name, weight in read_hugging_face(file, ours).items():
        np.testing.assert_allclose(np.asarray(weight), np.asarray(wanted[name]), atol=1e-6, err_msg=name)


@pytest.mark.parametrize(("architecture", "kind"), [("llama", "Q4_1"), ("qwen2", "Q8_0"), ("qwen3", "F16")])
def test_transformers_reads_the_same_weights(architecture, kind, tmp_path):
    """It dequantizes the file itself, and undoes what llama.cpp's converter does by code of its own."""
    write_gguf(tmp_path / "model.gguf", model_of(architecture), architecture, kind)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32)
    state = {name: value.numpy() for name, value in theirs.state_dict().items()}
    found = read_tensor_file(tmp_path / "model.gguf")
    assert set(found) | {"lm_head.weight"} == set(state) | {"lm_head.weight"}
    for name, tensor in found.items():
        np.testing.assert_array_equal(np.asarray(tensor, np.float32), state[name], err_msg=name)


@pytest.mark.parametrize("kind", [*CODES, *K_CODES, "F32", "F16", "BF16"])
def test_types_are_those_of_the_package(kind, tmp_path):
    """Values and slices of a tensor of each type, beside gguf's own reader and dequantization."""
    number = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[number]
    assert TYPES[number.value] == (kind, block, size)
    random = np.random.default_rng(0)
    values = random.normal(size=(48, 512)).astype(np.float32)
    if kind in K_CODES:  # which the package does not write: codes of any kind, but no infinite scales
        values = (random.integers(0, 256, (48, 512 // block * size)) & 0x3B).astype(np.uint8)
    writer = gguf.GGUFWriter(str(tmp_path / "one.gguf"), "llama")
    add_tensor(writer, "blk.0.ffn_up.weight", values, kind)
    add_tensor(writer, "token_embd.weight", random.normal(size=(8, 64)).astype(np.float32), "F32")
    for name in ("block_count", "context_length", "embedding_length", "feed_forward_length", "head_count"):
        getattr(writer, f"add_{name}")(2)
    finish(writer)
    (stored, _) = gguf.GGUFReader(tmp_path / "one.gguf").tensors
    wanted = gguf.dequantize(stored.data, number)
    tensor = read_tensor_file(tmp_path / "one.gguf")["model.layers.0.mlp.up_proj.weight"]
    assert tensor.shape == (48, 512)
    np.testing.assert_array_equal(np.asarray(tensor, np.float32), wanted)
    place = (slice(17, 30), slice(3, 500))
    np.testing.assert_array_equal(tensor.read(place).astype(np.float32), wanted[place])
    assert np.isfinite(wanted).all()
    assert np.ptp(wanted) > 0


def test_a_split_model_is_read_from_its_first_part(tmp_path):
    model = model_of("qwen2")
    whole = write_gguf(tmp_path / "whole.gguf", model, "qwen2", "Q8_0")
    (tmp_path / "split").mkdir()
    write_gguf(tmp_path / "split" / "model.gguf", model, "qwen2", "Q8_0", parts=10)
    names = sorted(path.name for path in (tmp_path / "split").iterdir())
    assert names == [f"model-{number:05d}-of-00003.gguf" for number in (1, 2, 3)]
    first = tmp_path / "split" / names[0]
    wanted = read_tensor_file(whole)
    for place in (first, tmp_path / "split"):
        config = read_model_config(place)
        found = read_hugging_face(place, config)
        assert {weight.source.path.name for weight in found.values()} == {*names}
    for name, tensor in read_tensor_file(first).items():
        np.testing.assert_array_equal(np.asarray(tensor), np.asarray(wanted[name]))
    second = first.with_name(names[1])
    second.write_bytes(first.with_name(names[2]).read_bytes())
    with pytest.raises(UserError, match=r"00002-of-00003\.gguf: is not part 2"):
        read_model_config(first)
    second.unlink()
    with pytest.raises(UserError, match=r"00002-of-00003\.gguf: no such file"):
        read_model_config(first)


def test_a_directory_with_a_config_json_names_its_gguf_files(tmp_path):
    model = model_of("qwen2")
    model.config.save_pretrained(tmp_path)
    write_gguf(tmp_path / "model.gguf", model, "qwen2")
    with pytest.raises(UserError, match=r"its weights are in GGUF; pass one of its files, such as .*model\.gguf"):
        read_hugging_face(tmp_path, read_model_config(tmp_path))


def test_a_tensor_is_dequantized_in_little_memory(tmp_path):
    """A tensor and a part of it at a time, whatever else the file holds."""
    codes = (np.random.default_rng(0).integers(0, 256, (16384, 288)) & 0x3B).astype(np.uint8)
    writer = gguf.GGUFWriter(str(tmp_path / "some.gguf"), "llama")
    for layer in range(4):
        add_tensor(writer, f"blk.{layer}.ffn_up.weight", codes, "Q4_K")
    add_tensor(writer, "token_embd.weight", np.ones((8, 64), np.float32), "F32")
    for name in ("block_count", "context_length", "embedding_length", "feed_forward_length", "head_count"):
        getattr(writer, f"add_{name}")(2)
    finish(writer)
    tensors = read_tensor_file(tmp_path / "some.gguf")
    tracemalloc.start()
    sizes = [np.asarray(tensor).nbytes for tensor in tensors.values()]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sum(sizes) > 4 * 33e6
    assert peak < max(sizes) + 90e6


def test_frequencies_of_llama_3_are_its_scaling(tmp_path):
    scaling = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 8192}
    model = random_llama(**SIZES, rope_parameters={"rope_theta": 5e5, **scaling})
    ours = 1 / model.model.rotary_emb.inv_freq.numpy() * 5e5 ** (-np.arange(0, 16, 2) / 16)
    np.testing.assert_allclose(llama3_divisors(scaling, 5e5, 16), ours, rtol=1e-5)
    frequencies = {"rope_freqs.weight": ours.astype(np.float32)}
    file = write_gguf(tmp_path / "model.gguf", model, "llama", extra_tensors=frequencies)
    assert read_model_config(file).rope_scaling.model_dump() == {
        "type": "llama3", "factor": pytest.approx(32, rel=1e-5), "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    others = {"rope_freqs.weight": np.linspace(1, 3, 8, dtype=np.float32)}
    file = write_gguf(tmp_path / "other.gguf", model, "llama", extra_tensors=others)
    with pytest.raises(UserError, match=r"rope_freqs\.weight: differs from the divisors of Llama 3\.1"):
        read_model_config(file)


@pytest.mark.parametrize(
    ("more", "wanted"),
    [
        ({"add_rope_scaling_type": gguf.RopeScalingType.LINEAR, "add_rope_scaling_factor": 4.0}, ("linear", 4.0, None)),
        ({"add_rope_scaling_type": gguf.RopeScalingType.YARN, "add_rope_scaling_factor": 4.0,
          "add_rope_scaling_orig_ctx_len": 32}, ("yarn", 4.0, 32)),
    ],
)  # fmt: skip
def test_scaled_positions(more, wanted, tmp_path):
    scaling = read_model_config(write_gguf(tmp_path / "a.gguf", model_of("qwen2"), "qwen2", more=more)).rope_scaling
    assert (scaling.type, scaling.factor, getattr(scaling, "original_max_position_embeddings", None)) == wanted


def test_a_run_takes_its_architecture_and_tokenizer_from_the_file(tmp_path):
    file = write_gguf(tmp_path / "model.gguf", model_of("qwen2"), "qwen2")
    run = load_config(file)
    assert (run.model.config.hidden_size, run.model.config.model_type) == (64, "qwen2")
    assert run.processor.tokenizer.vocab_file == str(file)
    assert load_tokenizer(tmp_path).path == file
    named = load_config({"pretrained_model_dir": str(tmp_path), "run_mode": "predict"})
    assert named.model.config.num_layers == 2
    with pytest.raises(UserError, match=f"hidden_size: contradicts hidden_size of {file}, which is 64"):
        load_config(
            {"load_checkpoint": str(file), "run_mode": "predict", "model": {"model_config": {"hidden_size": 128}}}
        )
    write_gguf(tmp_path / "second.gguf", model_of("qwen2"), "qwen2")
    with pytest.raises(UserError, match=r"holds 2 GGUF files; name one of them, such as model\.gguf"):
        load_config({"load_checkpoint": str(tmp_path), "run_mode": "predict"})


def small_file(path):
    return write_gguf(path, random_llama(**{**SIZES, "num_hidden_layers": 1}), "llama", "Q8_0")


def everything(path):
    """All that a model is read from."""
    model = read_model_config(path)
    load_tokenizer(path)
    return [np.asarray(weight) for weight in read_hugging_face(path, model).values()]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda data: data[:1000], "truncated"),
        (lambda data: data[:-100], "the file is incomplete"),
        (lambda data: b"GGML" + data[4:], "begins with b'GGML', not b'GGUF'"),
        (lambda data: data[:4] + struct.pack("<I", 1) + data[8:], "version 1 is unsupported"),
        (lambda data: data[:4] + struct.pack(">I", 3) + data[8:], "big endian is unsupported"),
        (
            lambda data: data[:8] + struct.pack("<Q", 1 << 60) + data[16:],
            "it claims to have 1,152,921,504,606,846,976 tensors",
        ),
        (lambda data: data[:16] + struct.pack("<Q", 1 << 40) + data[24:], "it claims to have 1,099,511,627,776 keys"),
        (lambda data: data[:24] + struct.pack("<Q", 1 << 30) + data[32:], "a text of 1,073,741,824 bytes"),
    ],
)
def test_a_damaged_file_is_one_line_and_little_memory(damage, said, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(damage(small_file(path).read_bytes()))
    tracemalloc.start()
    with pytest.raises(UserError) as refused:
        everything(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert said in str(refused.value)
    assert str(refused.value).startswith(str(path))
    assert "\n" not in str(refused.value)
    assert peak < 20e6


@pytest.mark.parametrize(
    ("array", "said"),
    [((8, (1 << 22) + 1), "4,194,305 entries"), ((6, 1 << 60), "entries in k"), ((8, 100_000), "general.architecture")],
)
def test_a_sparse_file_of_a_terabyte_costs_nothing(array, said, tmp_path):
    path = tmp_path / "model.gguf"
    keys = struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", 9, *array)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + keys)
    with path.open("r+b") as file:
        file.truncate(1 << 40)
    tracemalloc.start()
    with pytest.raises(UserError, match=said):
        read_model_config(path)
    assert tracemalloc.get_traced_memory()[1] < 20e6
    tracemalloc.stop()


def header_of(keys, tensors=b"", tensor_count=0):
    """Return a header; ``keys`` are names with the type and bytes of their value."""
    fields = [struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + value for name, kind, value in keys]
    return b"GGUF" + struct.pack("<IQQ", 3, tensor_count, len(keys)) + b"".join(fields) + tensors


def arrays(kind, count, entries, number):
    return [(b"key%d" % index, 9, struct.pack("<IQ", kind, count) + entries) for index in range(number)]


def text(content):
    return struct.pack("<Q", len(content)) + content


LARGE_HEADERS = {
    "bytes": lambda: header_of(arrays(0, 4_000_000, bytes(4_000_000), 16)),
    "booleans": lambda: header_of(arrays(7, 4_000_000, bytes(4_000_000), 16)),
    "floats": lambda: header_of(arrays(6, 4_000_000, bytes(16_000_000), 4)),
    "short texts": lambda: header_of(arrays(8, 500_000, text(b"ab") * 500_000, 2)),
    "empty texts": lambda: header_of(arrays(8, 500_000, text(b"") * 500_000, 2)),
    "wide texts": lambda: header_of(
        [(b"key%d" % index, 8, text("😀".encode() + b"a" * (15 << 20))) for index in range(3)]
    ),
    "tensors": lambda: header_of([], (text(b"t") + struct.pack("<IIQ", 0, 0, 0)) * 65_537, 65_537),
    "keys": lambda: header_of([(b"%08d" % index + b"x" * 1000, 0, b"1") for index in range(65_000)]),
}


@pytest.mark.parametrize("kind", LARGE_HEADERS)
def test_a_large_header_is_read_in_bounded_memory(kind, tmp_path):
    """A few hundred megabytes of arrays must not become gigabytes of Python objects."""
    path = tmp_path / "model.gguf"
    path.write_bytes(LARGE_HEADERS[kind]())
    tracemalloc.start()
    try:
        with pytest.raises(UserError):
            read_model_config(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        path.unlink()
    assert peak < (200e6 if kind in ("wide texts", "tensors", "keys") else 20e6)


def test_arrays_are_read_when_they_are_asked_for(tmp_path):
    path = tmp_path / "model.gguf"
    texts = b"".join(map(text, (b"a", b"", "ü".encode(), b"\xff")))
    keys = [
        (b"texts", 9, struct.pack("<IQ", 8, 4) + texts),
        (b"floats", 9, struct.pack("<IQ2f", 6, 2, 0.5, -1)),
        (b"flags", 9, struct.pack("<IQ3B", 7, 3, 0, 1, 2)),
        (b"none", 9, struct.pack("<IQ", 8, 0)),
        (b"large", 9, struct.pack("<IQ", 12, 1 << 22) + bytes(8 << 22)),
        (b"flag", 7, b"\1"),
        (b"count", 10, struct.pack("<Q", 1 << 63)),
    ]
    path.write_bytes(header_of(keys))
    header = read_header(path)
    assert [header.get(name, list) for name in ("texts", "floats", "flags", "none")] == [
        ["a", "", "ü", "\ufffd"], [0.5, -1.0], [False, True, True], [],
    ]  # fmt: skip
    assert (header.get("flag", bool), header.get("count", int)) == (True, 1 << 63)
    with pytest.raises(UserError, match=r"texts: must be of type int \(value \['a'"):
        header.get("texts", int)


def test_an_array_that_is_too_large_is_refused_when_it_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(gguf_header, "LARGEST_ARRAY", 100)
    path = tmp_path / "model.gguf"
    path.write_bytes(header_of(arrays(0, 101, bytes(101), 1)))
    with pytest.raises(UserError, match=r"key0: cannot be read .an array of 101 bytes exceeds the limit of 100"):
        read_header(path).get("key0", list)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=100)
@given(places=st.lists(st.tuples(st.integers(0, 6000), st.integers(0, 255)), min_size=1, max_size=4))
def test_any_damage_is_read_or_refused(places, tmp_path):
    path = tmp_path / "model.gguf"
    kept = tmp_path / "whole"
    if not kept.exists():
        kept.write_bytes(small_file(path).read_bytes())
    data = bytearray(kept.read_bytes())
    for place, byte in places:
        data[place % len(data)] = byte
    path.write_bytes(data)
    try:
        everything(path)
    except UserError as error:
        assert len(str(error)) < 20_000  # noqa: PT017


@pytest.mark.parametrize(
    ("architecture", "key", "value", "said"),
    [
        ("clip", "add_block_count", 1, "general.architecture: unsupported (value clip)"),
        ("llama", "add_head_count", [4, 2], "llama.attention.head_count: layers with different values are unsupported"),
        ("llama", "add_rope_dimension_count", 8, "llama.rope.dimension_count: must be the size of a head, 16"),
        (
            "llama",
            "add_uint32",
            ("split.count", 3),
            "the first of 3 parts of a model, which must be named NAME-00001-of-00003.gguf",
        ),
    ],
)
def test_what_is_not_read_is_named(architecture, key, value, said, tmp_path):
    writer = gguf.GGUFWriter(str(tmp_path / "a.gguf"), architecture)
    for name in ("block_count", "context_length", "feed_forward_length", "head_count"):
        getattr(writer, f"add_{name}")(4) if f"add_{name}" != key else None
    writer.add_embedding_length(64)
    getattr(writer, key)(*(value if isinstance(value, tuple) else (value,)))
    add_tensor(writer, "token_embd.weight", np.ones((8, 64), np.float32), "F32")
    finish(writer)
    with pytest.raises(UserError) as refused:
        read_model_config(tmp_path / "a.gguf")
    assert said in str(refused.value)
