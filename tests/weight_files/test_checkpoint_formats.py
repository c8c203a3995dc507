"""Files of weights of others: the values are those that PyTorch and MindSpore wrote, nothing in them is run, damage is named."""

import json
import pickle
import pickletools
import struct
import subprocess
import sys
import zipfile

import mindspore
import ml_dtypes
import numpy as np
import pytest
import torch

from mindllm.errors import UserError
from mindllm.weight_files.hugging_face import read_tensor_directory, read_tensor_file
from mindllm.weight_files.pickled import LEGACY

TORCH_DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]


def as_bytes(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def same(found, tensors):
    assert list(found) == list(tensors)
    for name, tensor in tensors.items():
        values = np.asarray(found[name])
        assert values.shape == tuple(tensor.shape) == found[name].shape
        assert values.dtype == found[name].dtype
        assert values.dtype.name == str(tensor.dtype).removeprefix("torch.")
        assert values.tobytes() == as_bytes(tensor)


# --- PyTorch's files ---------------------------------------------------------------------------------------------------


def some_tensors():
    torch.manual_seed(0)
    table = torch.randn(6, 10)
    tensors = {f"a.{dtype}": (torch.randn(3, 5) * 9).to(dtype) for dtype in TORCH_DTYPES}
    views = {"transposed": table.T, "slice": table[1:4, 2:9:3], "again": table, "scalar": torch.tensor(3.5)}
    return {**tensors, **views, "empty": torch.empty(0, 4), "of one": table[:1].T[:, :1]}


def test_pickled_tensors_of_every_type_and_layout(tmp_path):
    tensors = some_tensors()
    torch.save(tensors, tmp_path / "w.bin")
    same(read_tensor_file(tmp_path / "w.bin"), tensors)


def test_the_state_of_a_module_with_its_metadata_and_as_parameters(tmp_path):
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4))
    torch.save(module.state_dict(), tmp_path / "state.pt")
    same(read_tensor_file(tmp_path / "state.pt"), module.state_dict())
    torch.save(dict(module.named_parameters()), tmp_path / "parameters.pth")
    same(read_tensor_file(tmp_path / "parameters.pth"), {name: item.data for name, item in module.named_parameters()})


def test_pickled_shards_with_their_index(tmp_path):
    tensors = {name: torch.randn(4, 3) for name in ("a.weight", "b.weight", "c.weight", "model.rotary_emb.inv_freq")}
    names = list(tensors)
    for number, part in enumerate((names[:2], names[2:])):
        torch.save({name: tensors[name] for name in part}, tmp_path / f"pytorch_model-{number}.bin")
    places = {name: f"pytorch_model-{int(index >= 2)}.bin" for index, name in enumerate(names)}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": places}))
    same(read_tensor_directory(tmp_path), {name: tensors[name] for name in names[:3]})


def test_reading_pickled_tensors_needs_no_torch(tmp_path):
    torch.save({"a": torch.ones(2, 2)}, tmp_path / "w.bin")
    code = (
        "import sys, numpy; from pathlib import Path\n"
        "from mindllm.weight_files.hugging_face import read_tensor_file\n"
        "assert numpy.asarray(read_tensor_file(Path(sys.argv[1]))['a']).sum() == 4\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "w.bin")], check=True, timeout=120)


def archive(path, content, parts=(), compression=zipfile.ZIP_STORED):
    """An archive as torch.save writes it, around the pickle ``content``."""
    with zipfile.ZipFile(path, "w", compression) as file:
        file.writestr("w/data.pkl", content)
        file.writestr("w/byteorder", "little")
        for name, data in parts:
            file.writestr(f"w/data/{name}", data)
    return path


class Call:
    """Pickles as a call of ``function``."""

    def __init__(self, function, *arguments):
        self.pair = (function, arguments)

    def __reduce__(self):
        return self.pair


def touch(path):
    raise AssertionError(f"the pickle was run and would have written {path}")


def nested(depth, code):
    """Values in values, ``depth`` deep, under a key."""
    return b"\x80\x02}X\x01\x00\x00\x00a" + b")" + code * depth + b"s."


def doubling(steps):
    """A tuple that holds one before it twice, and so on: short in the file, endless as text."""
    return b"\x80\x02)" + b"".join(b"q" + bytes([n]) + b"h" + bytes([n]) + b"\x86" for n in range(steps)) + b"Q."


HOSTILE = {
    "os.system": (pickle.dumps({"a": Call(__import__("os").system, "true")}, 2), r"posix\.system"),
    "eval": (pickle.dumps({"a": Call(eval, "1")}, 2), r"eval, which is not a tensor"),
    "protocol 4": (pickle.dumps({"a": Call(print, "x")}, 4), r"builtins\.print"),
    "a class": (pickle.dumps({"a": zipfile.ZipFile}, 2), r"zipfile\.ZipFile"),
    "an object of torch": (b"\x80\x02ctorch\nload\n.", r"torch\.load"),
    "an attribute of one allowed": (b"\x80\x02ctorch._utils\n_rebuild_tensor_v2.__globals__\n.", r"__globals__"),
    "INST": (b"(S'true'\nios\nsystem\n.", r"instruction INST"),
    "OBJ": (b"(cos\nsystem\nS'true'\no.", r"os\.system"),
    "EXT1": (b"\x80\x02\x82\x01.", r"instruction EXT1"),
    "NEWOBJ": (b"\x80\x02ccollections\nOrderedDict\n)\x81.", r"instruction NEWOBJ"),
    "a call of a text": (b"\x80\x02X\x01\x00\x00\x00a)R.", r"it calls a value of type str"),
    "attributes of a tuple": (b"\x80\x02)}b.", r"sets attributes of a value of type tuple"),
    "a set": (pickle.dumps({"a": {1}}, 4), r"instruction EMPTY_SET"),
    "no dictionary": (pickle.dumps([1], 2), r"a value of type list instead of a dictionary of tensors"),
    "a number by name": (pickle.dumps({"step": 3}, 2), r"a value of type int under 'step'"),
    "a nested dictionary": (
        pickle.dumps({"model": {}}, 2),
        r"a value of type dict under 'model'.*only the state_dict of the model",
    ),
    "a name that is no text": (pickle.dumps({3: None}, 2), r"instead of a tensor"),
    "a tuple as a key": (pickle.dumps({(1, 2): None}, 2), r"type tuple as the key of a dictionary"),
    "nothing": (b"", r"an incomplete pickle"),
    "no end": (pickle.dumps({"a": None}, 2)[:-1], r"an incomplete pickle"),
    "no pickle": (b"<html>not found</html>", r"an incomplete pickle"),
    "an empty stack": (b"\x80\x02s.", r"an incomplete pickle"),
    "a memo that is not there": (b"\x80\x02h\x05.", r"an incomplete pickle"),
    "text that is longer than the file": (b"\x80\x02X\xff\xff\xff\x7fab.", r"an incomplete pickle"),
    "a number of 5000 digits": (b"I" + b"9" * 5000 + b"\n.", r"an incomplete pickle"),
    "deep tuples": (nested(200_000, b"\x85"), r"type tuple under 'a'"),
    "doubled tuples": (doubling(200), r"not the storage of a tensor"),
    "a list of itself": (b"\x80\x02]q\x00h\x00a.", r"type list instead of a dictionary"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_pickle_is_refused_by_name_and_not_run(tmp_path, name):
    content, message = HOSTILE[name]
    path = archive(tmp_path / "w.bin", content)
    with pytest.raises(UserError, match=message) as error:
        read_tensor_file(path)
    assert str(error.value).startswith(f"{path}: ")
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500


def test_a_memo_index_takes_no_memory(tmp_path):
    """Python's own unpickler makes room for 2**31 entries here."""
    assert read_tensor_file(archive(tmp_path / "w.bin", b"\x80\x02}r\xff\xff\xff\x7f.")) == {}


def test_the_unpickler_of_python_would_have_run_it():
    """The corpus is no straw man: Python's own unpickler does call what it names."""
    with pytest.raises(AssertionError, match="was run"):
        pickle.loads(pickle.dumps({"a": Call(touch, "x")}, 2))
    assert any(code.name == "REDUCE" for code, *_ in pickletools.genops(HOSTILE["os.system"][0]))


def rewritten(tmp_path, change, tensors=None):
    """A file of torch.save with its parts changed."""
    torch.save(tensors or {"a": torch.ones(2, 3)}, tmp_path / "whole.bin")
    with zipfile.ZipFile(tmp_path / "whole.bin") as source, zipfile.ZipFile(tmp_path / "w.bin", "w") as target:
        parts = {info.filename.partition("/")[2]: source.read(info) for info in source.infolist()}
        change(parts)
        for name, data in parts.items():
            target.writestr(f"w/{name}", data)
    return tmp_path / "w.bin"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda parts: parts.pop("data/0"), r"part w/data/0 is missing"),
        (lambda parts: parts.update({"data/0": bytes(23)}), r"has 23 bytes and 24 are needed"),
        (lambda parts: parts.update(byteorder=b"big"), r"not little endian"),
        (lambda parts: parts.pop("data.pkl"), r"without a data.pkl"),
        (lambda parts: parts.update({"code/data.pkl": b""}), r"without a data.pkl"),
        # the shape (2, 3) becomes (255, 3), then the strides (3, 1) become (0, 0)
        (
            lambda parts: parts.update({"data.pkl": parts["data.pkl"].replace(b"K\x02K\x03\x86", b"K\xffK\x03\x86")}),
            r"\[255, 3\]",
        ),
        (
            lambda parts: parts.update({"data.pkl": parts["data.pkl"].replace(b"K\x03K\x01\x86", b"K\x00K\x00\x86")}),
            r"\[2, 3\]",
        ),
    ],
)
def test_an_archive_that_does_not_hold_its_tensors(tmp_path, change, message):
    with pytest.raises(UserError, match=message):
        read_tensor_file(rewritten(tmp_path, change))


def test_a_compressed_archive(tmp_path):
    with pytest.raises(UserError, match="compressed"):
        read_tensor_file(archive(tmp_path / "w.bin", pickle.dumps({}, 2), compression=zipfile.ZIP_DEFLATED))


@pytest.mark.parametrize("keep", [0, 1, 100, -30, -1])
def test_a_truncated_file_of_torch(tmp_path, keep):
    torch.save({"a": torch.ones(20, 3)}, tmp_path / "w.bin")
    content = (tmp_path / "w.bin").read_bytes()
    (tmp_path / "w.bin").write_bytes(content[:keep])
    with pytest.raises(UserError, match=r"w.bin: not a file of pickled tensors, or incomplete"):
        read_tensor_file(tmp_path / "w.bin")


def test_the_old_format_of_torch_is_refused_with_the_way_out(tmp_path):
    torch.save({"a": torch.ones(2)}, tmp_path / "w.bin", _use_new_zipfile_serialization=False)
    assert (tmp_path / "w.bin").read_bytes().startswith(LEGACY)
    with pytest.raises(UserError, match=r"before 1\.6; convert it, if you trust the file.*weights_only=True"):
        read_tensor_file(tmp_path / "w.bin")


# --- MindSpore's files -------------------------------------------------------------------------------------------------


def save_ckpt(path, arrays, **options):
    tensors = [
        {"name": name, "data": mindspore.Tensor(values.astype(np.float32), mindspore.bfloat16)}
        if values.dtype == ml_dtypes.bfloat16
        else {"name": name, "data": mindspore.Tensor(values)}
        for name, values in arrays.items()
    ]
    mindspore.save_checkpoint(tensors, str(path), **options)


def some_arrays():
    random = np.random.default_rng(0)
    values = {
        name: (random.normal(size=(4, 6)) * 9).astype(name)
        for name in ("float64", "float32", "float16", "int32", "int8")
    }
    return {**values, "bfloat16": random.normal(size=(3, 2)).astype(ml_dtypes.bfloat16), "bool": np.eye(3, dtype=bool)}


@pytest.mark.parametrize("crc", [False, True])
def test_a_checkpoint_of_mindspore(tmp_path, crc):
    arrays = {**some_arrays(), "scalar": np.asarray(7, np.int32)}
    save_ckpt(tmp_path / "net.ckpt", arrays, crc_check=crc, append_dict={"epoch_num": 3, "name": "cosine"})
    found = read_tensor_file(tmp_path / "net.ckpt")
    assert list(found) == [*arrays, "epoch_num"], "texts are no tensors"
    for name, values in arrays.items():
        assert np.asarray(found[name]).tobytes() == values.tobytes()
        assert (found[name].shape, found[name].dtype) == (values.shape, values.dtype)
    assert int(np.asarray(found["epoch_num"])) == 3


def test_a_large_tensor_is_in_pieces_and_is_whole_again(tmp_path, monkeypatch):
    monkeypatch.setattr("mindspore.train.serialization.SLICE_SIZE", 1)
    values = np.random.default_rng(0).normal(size=(1000, 3)).astype(np.float32)
    save_ckpt(tmp_path / "net.ckpt", {"a": values, "b": values[:1]})
    found = read_tensor_file(tmp_path / "net.ckpt")
    assert len(found["a"].places) > 1
    np.testing.assert_array_equal(found["a"], values)
    np.testing.assert_array_equal(found["b"], values[:1])


def field(number, content):
    return varint(number << 3 | 2) + varint(len(content)) + content


def varint(value):
    content = b""
    while value > 0x7F:
        content += bytes([value & 0x7F | 0x80])
        value >>= 7
    return content + bytes([value])


def value(tag, dims, kind="Float32", content=b"", tensor=None):
    dims = b"".join(b"\x08" + varint(size % 2**64) for size in dims)
    tensor = dims + field(2, kind.encode()) + field(3, content) if tensor is None else tensor
    return field(1, field(1, tag.encode()) + field(2, tensor))


def test_a_file_over_2_gb_is_read_in_place(tmp_path):
    hole = 5 * 2**29
    tensor = b"\x08" + varint(hole) + b"\x12\x04Int8" + b"\x1a" + varint(hole)
    head = b"\x0a\x05large\x12" + varint(len(tensor) + hole) + tensor
    with open(tmp_path / "net.ckpt", "wb") as file:
        file.write(b"\x0a" + varint(len(head) + hole) + head)
        file.seek(hole, 1)
        file.write(value("small", [2], content=struct.pack("<2f", 1.5, 2.5)))
    found = read_tensor_file(tmp_path / "net.ckpt")
    assert found["large"].shape == (hole,)
    np.testing.assert_array_equal(found["small"], [1.5, 2.5])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has no tensors"),
        (b"not a checkpoint", "encrypted|breaks off"),
        (value("a", [3], content=bytes(8)), r"tensor a of shape \[3\] needs 12 bytes and has 8"),
        (value("a", [-3], content=bytes(12)), r"tensor a has the shape \[-3\]"),
        (value("a", [1] * 50, content=bytes(4)), r"tensor a has the shape"),
        (value("a", [2**62, 2**62], content=bytes(4)), r"tensor a of shape .* needs \d+ bytes"),
        (value("a", [1], "Complex64", bytes(8)), r"tensor a has the unknown type Complex64"),
        (value("a", [1], tensor=field(2, b"Float32")), r"tensor a has no content"),
        (
            value("a", [1], content=bytes(4)) + value("b", [1], content=bytes(4)) + value("a", [1], content=bytes(4)),
            "a is in it twice",
        ),
        (value("a", [2], content=bytes(4)) + value("a", [3], content=bytes(4)), "pieces of tensor a"),
        (field(1, field(1, b"a") + field(3, b"")), "a is not a tensor"),
        (field(1, field(2, b"")), "not a checkpoint of MindSpore"),
        (b"\x0a" + b"\xff" * 10, "breaks off"),
        (field(1, field(1, b"\xff\xfe") + field(2, b"")), "not a checkpoint file of MindSpore"),
    ],
)
def test_a_damaged_checkpoint_of_mindspore(tmp_path, content, message):
    (tmp_path / "net.ckpt").write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        read_tensor_file(tmp_path / "net.ckpt")
    assert str(error.value).startswith(f"{tmp_path / 'net.ckpt'}: not a checkpoint file of MindSpore, or incomplete")


@pytest.mark.parametrize("keep", [1, 5, 40, -1])
def test_a_truncated_checkpoint_of_mindspore(tmp_path, keep):
    save_ckpt(tmp_path / "net.ckpt", some_arrays())
    content = (tmp_path / "net.ckpt").read_bytes()
    (tmp_path / "part.ckpt").write_bytes(content[:keep])
    with pytest.raises(UserError, match=r"part\.ckpt: not a checkpoint file of MindSpore"):
        read_tensor_file(tmp_path / "part.ckpt")


def test_other_files(tmp_path):
    with pytest.raises(UserError, match=r"a.ckpt: no such file"):
        read_tensor_file(tmp_path / "a.ckpt")
    (tmp_path / "a.npz").write_bytes(b"")
    with pytest.raises(UserError, match=r"a.npz: not a file of weights; supported are .safetensors, .ckpt, .bin"):
        read_tensor_file(tmp_path / "a.npz")
