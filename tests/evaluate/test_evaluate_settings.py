"""Options of texts that a task asks for: its own, those of generation_config.json beneath them, and defaults of transformers."""

import pytest

pytest.importorskip("lm_eval")

from mindllm.evaluate.requests import generation_options

SETTINGS = {"do_sample": True, "temperature": 0.6, "top_p": 0.8, "repetition_penalty": 1.1, "max_new_tokens": 4096}


@pytest.mark.parametrize(
    ("wishes", "expected"),
    [
        ({"do_sample": False, "temperature": 0.0}, (False, 1.0, 0, 1.0, 1.1)),
        ({"do_sample": True, "temperature": 0.3}, (True, 0.3, 50, 0.8, 1.1)),
        ({"do_sample": True, "temperature": 0.3, "top_k": 5, "repetition_penalty": 1.0}, (True, 0.3, 5, 0.8, 1.0)),
    ],
)
def test_a_task_goes_first_and_decides_whether_tokens_are_drawn(wishes, expected):
    found = generation_options({**wishes, "max_gen_toks": 8, "until": ["\n"]}, 64, ("</s>",), SETTINGS)
    assert (found.do_sample, found.temperature, found.top_k, found.top_p, found.repetition_penalty) == expected
    assert (found.max_new_tokens, found.stops) == (8, ("\n", "</s>"))
