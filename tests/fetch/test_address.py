"""Addresses of hubs are read for the model they show."""

import pytest

from mindllm.errors import UserError
from mindllm.fetch.hub import Address, read_address

MODEL = "Qwen/Qwen2.5-0.5B"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (f"https://huggingface.co/{MODEL}", Address("huggingface", MODEL)),
        (f"http://www.huggingface.co/{MODEL}/", Address("huggingface", MODEL)),
        (f"hf.co/{MODEL}?library=transformers", Address("huggingface", MODEL)),
        (f"https://hf-mirror.com/{MODEL}/tree/main", Address("huggingface", MODEL)),
        (f"https://huggingface.co/{MODEL}/blob/v1.1/config.json", Address("huggingface", MODEL, "v1.1")),
        (f"https://huggingface.co/{MODEL}/discussions/3", Address("huggingface", MODEL)),
        (f"https://modelscope.cn/models/{MODEL}/files", Address("modelscope", MODEL)),
        (f"https://www.modelscope.cn/models/{MODEL}/file/view/master/README.md", Address("modelscope", MODEL)),
        (MODEL, None),
        ("qwen2_5_0_5b", None),
        ("https://example.org/a/b", None),
    ],
)
def test_an_address_is_read(text, found):
    assert read_address(text) == found


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("https://huggingface.co/datasets/openai/gsm8k", "is the page of a data set, not of a model"),
        ("https://huggingface.co/spaces/a/b", "is the page of a program, not of a model"),
        ("https://huggingface.co/Qwen", "is the page of no model; give ORGANISATION/MODEL"),
    ],
)
def test_what_is_no_model_is_refused(text, said):
    with pytest.raises(UserError, match=said):
        read_address(text)


def test_the_command_takes_the_name_out_of_an_address(monkeypatch):
    """The hub that the address names is asked, unless another is; so is its revision."""
    from mindllm.cli.fetch import main
    from mindllm.fetch.huggingface import HuggingFace
    from mindllm.fetch.modelscope import ModelScope

    asked = []

    def list_files(self, *of):
        asked.append((type(self), *of))
        raise UserError("asked")

    for hub in (HuggingFace, ModelScope):
        monkeypatch.setattr(hub, "list_files", list_files)
    page = f"https://huggingface.co/{MODEL}/tree/v1.1"
    scope = f"https://modelscope.cn/models/{MODEL}"
    for words in ([page], [page, "--revision", "v2"], [page, "--from", "modelscope"], [scope], [MODEL]):
        with pytest.raises(UserError, match="asked"):
            main(words)
    assert asked == [
        (HuggingFace, MODEL, "v1.1", []),
        (HuggingFace, MODEL, "v2", []),
        (ModelScope, MODEL, "v1.1", []),
        (ModelScope, MODEL, None, []),
        (HuggingFace, MODEL, None, []),
    ]
