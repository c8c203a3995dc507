"""Which answers belong to a model: those of other weights, or of another adapter beside them, are not taken for its own."""

from types import SimpleNamespace

import pytest

pytest.importorskip("lm_eval")

from mindllm.evaluate.load import identity
from mindllm.weight_files import Pretrained


def name_of(base, adapter=None, fingerprint="tokenizer"):
    config = SimpleNamespace(seed=0, model=SimpleNamespace(config=SimpleNamespace(model_dump_json=lambda: "{}")))
    beside = SimpleNamespace(path=adapter) if adapter else None
    return identity(config, Pretrained({}, str(base), beside), SimpleNamespace(fingerprint=fingerprint))


def test_answers_are_those_of_weights_adapter_and_tokenizer(tmp_path):
    for name in ("base", "one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(name.encode())
    base, one, two = (tmp_path / name for name in ("base", "one", "two"))
    names = [name_of(base), name_of(base, one), name_of(base, two), name_of(one), name_of(base, fingerprint="other")]
    assert len(set(names)) == len(names)
    assert name_of(base, one) == names[1]
    (base / "model.safetensors").write_bytes(b"longer than before")
    assert name_of(base, one) != names[1]
    assert name_of(base / "model.safetensors") != names[0]
