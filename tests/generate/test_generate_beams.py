"""Beam search finds the sequences and the scores that transformers finds, prompt by prompt and in batches."""

import numpy as np
import pytest
from tiny import SHAPES, VOCABULARY, options, tiny_config, tiny_model

from mindllm.generate.generator import Generator

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from hugging_face import ROPE_SCALINGS, hugging_face_llama  # noqa: E402

NEW, END = 14, 69
PROMPTS = [
    np.random.default_rng(seed).integers(0, VOCABULARY, length).tolist() for seed, length in ((3, 9), (4, 17), (5, 2))
]


def build(shape, scaling=None, eos=None):
    """Generators of both sides; weights small enough that beams compete."""
    mine, other = ROPE_SCALINGS[scaling] if scaling else (None, None)
    config = tiny_config(**SHAPES[shape], rope_scaling=mine, eos_token_id=eos)
    model = tiny_model(config, scale=0.15)
    return Generator(model, config), hugging_face_llama(model, config, other)


def theirs(llama, prompt, eos, **keys):
    """Their sequences without prompt and padding, and their scores."""
    with torch.inference_mode():
        output = llama.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=NEW,
            eos_token_id=eos,
            pad_token_id=VOCABULARY,  # no token of the model: what is padding is certain
            return_dict_in_generate=True,
            output_scores=True,
            **keys,
        )
    rows = [[token for token in row if token != VOCABULARY] for row in output.sequences[:, len(prompt) :].tolist()]
    return [row[:-1] if row[-1] == eos else row for row in rows], output.sequences_scores.tolist()


def compare(generator, llama, eos, **keys):
    results = generator.generate(PROMPTS, options(NEW, **keys))
    count = keys.get("num_return_sequences", 1)
    finished = set()
    for index, prompt in enumerate(PROMPTS):
        mine = results[index * count : (index + 1) * count]
        sequences, scores = theirs(llama, prompt, eos, do_sample=False, **keys)
        assert [result.tokens for result in mine] == sequences
        assert [result.score for result in mine] == pytest.approx(scores, rel=1e-4)
        finished |= {result.finish_reason for result in mine}
    return finished


@pytest.mark.parametrize(("shape", "scaling"), [("multi-head", None), ("grouped", "linear"), ("tied", "llama3")])
def test_the_beams_of_every_attention_equal(shape, scaling):
    generator, llama = build(shape, scaling)
    assert compare(generator, llama, None, num_beams=4, num_return_sequences=4) == {"length"}


@pytest.fixture(scope="module")
def ending():
    """A model in which a token ends the text that is often likely and seldom the likeliest."""
    return *build("grouped", eos=END), END


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [1.0, 0.0, 2.5, -1.0])
def test_ends_lengths_and_early_stopping_equal(ending, early_stopping, length_penalty):
    keys = {"early_stopping": early_stopping, "length_penalty": length_penalty}
    finished = compare(*ending, num_beams=3, num_return_sequences=2, **keys)
    assert "eos" in finished, "some sequences end, or nothing is tested"


def test_penalties_change_the_beams_alike(ending):
    compare(*ending, num_beams=3, repetition_penalty=1.7)


def test_batches_and_the_graph_path_find_the_same(ending):
    generator, _, _ = ending
    beams = options(NEW, num_beams=3, num_return_sequences=2, output_logprobs=True)
    together = generator.generate(PROMPTS, beams)
    in_batches = [result for batch in generator.generate_in_batches(PROMPTS, beams, 2) for result in batch]
    in_graphs = Generator(generator.model, generator.model_config, native=False).generate(PROMPTS, beams)
    for results in (in_batches, in_graphs):
        assert [result.tokens for result in results] == [result.tokens for result in together]
        for mine, other in zip(results, together, strict=True):
            assert mine.logprobs == pytest.approx(other.logprobs, rel=1e-4, abs=1e-5)
    whole = next(result for result in together if result.finish_reason == "length")
    assert sum(whole.logprobs) / len(whole.tokens) == pytest.approx(whole.score)
