"""Generation with the cache is generation without it, for every shape of attention, batch and prompt."""

import numpy as np
import pytest
from tiny import SHAPES, VOCABULARY, greedy_without_cache, options, tiny_config, tiny_model

from mindllm.errors import RunFailed, UserError
from mindllm.generate.generator import Generator
from mindllm.generate.prompts import pieces
from mindllm.models.weights import assign, trained_weights

PROMPTS = [[5, 17, 3, 60, 22], [11], [9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 96, 42, 42, 42, 42, 42, 42, 42, 42, 13]]


@pytest.fixture(scope="module")
def grouped():
    config = tiny_config(n_kv_heads=2)
    model = tiny_model(config)
    return model, config, Generator(model, config)


@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_is_the_argmax_of_the_full_forward(shape):
    config = tiny_config(**SHAPES[shape])
    model = tiny_model(config)
    (result,) = Generator(model, config).generate([PROMPTS[0]], options(30))
    assert result.tokens == greedy_without_cache(model, config, PROMPTS[0], 30)
    assert result.finish_reason == "length"
    assert len(set(result.tokens)) > 3, "the model says more than one thing, or nothing is tested"


def test_unequal_prompts_of_a_batch_do_not_influence_each_other(grouped):
    model, config, generator = grouped
    together = generator.generate(PROMPTS, options(24))
    for prompt, result in zip(PROMPTS, together, strict=True):
        assert result.tokens == greedy_without_cache(model, config, prompt, 24)
    in_batches = generator.generate_in_batches(PROMPTS, options(24), batch_size=2)
    assert [result for batch in in_batches for result in batch] == together


def test_a_prompt_longer_than_a_piece_goes_through_in_pieces(grouped, monkeypatch):
    model, config, _ = grouped
    monkeypatch.setattr("mindllm.generate.prompts.WIDEST", 16)
    prompts = [list(range(3, 36)), list(range(50, 66)), [7]]
    assert pieces(33) == (3, 16)
    for prompt, result in zip(prompts, Generator(model, config).generate(prompts, options(8)), strict=True):
        assert result.tokens == greedy_without_cache(model, config, prompt, 8)


def test_a_row_that_ends_leaves_the_others_as_they_are(grouped):
    model, config, generator = grouped
    free = generator.generate(PROMPTS, options(24))
    end = next(token for token in free[0].tokens if token != free[0].tokens[0])
    ended = Generator(model, config.model_copy(update={"eos_token_id": end})).generate(PROMPTS, options(24))
    for before, after in zip(free, ended, strict=True):
        stop = before.tokens.index(end) if end in before.tokens else None
        assert after.tokens == before.tokens[:stop]
        assert after.finish_reason == ("length" if stop is None else "eos")


def test_sampling_repeats_and_does_not_depend_on_the_batch(grouped):
    *_, generator = grouped
    sampled = options(20, do_sample=True, temperature=1.5, top_k=40, top_p=0.95)
    first = generator.generate(PROMPTS, sampled, seed=3)
    assert generator.generate(PROMPTS, sampled, seed=3) == first
    assert generator.generate(PROMPTS[::-1], sampled, seed=3) == first[::-1]
    assert generator.generate(PROMPTS[1:2], sampled, seed=3) == first[1:2]
    assert generator.generate(PROMPTS, sampled, seed=4) != first
    assert generator.generate(PROMPTS, sampled.model_copy(update={"seed": 4}), seed=3) != first
    twice = generator.generate([PROMPTS[0]] * 2, sampled, seed=3)
    assert twice[0] == first[0] != twice[1]


def test_several_draws_of_a_prompt_follow_each_other(grouped):
    *_, generator = grouped
    sampled = options(20, do_sample=True, temperature=1.5)
    first = generator.generate(PROMPTS, sampled, seed=3)
    three = generator.generate(PROMPTS, sampled.model_copy(update={"num_return_sequences": 3}), seed=3)
    assert three[::3] == first
    assert len({tuple(result.tokens) for result in three}) == 9


def test_the_last_batch_may_be_smaller_and_is_not_compiled_for(grouped, monkeypatch):
    *_, generator = grouped
    together = generator.generate(PROMPTS, options(24))
    sessions = []
    real = generator._new_session
    monkeypatch.setattr(generator, "_new_session", lambda *args: sessions.append(args) or real(*args))
    in_batches = generator.generate_in_batches(PROMPTS, options(24), batch_size=2)
    assert [result for batch in in_batches for result in batch] == together
    assert len(sessions) == 1


class Letters:
    """A tokenizer whose tokens are letters and pairs of them."""

    eos_id = bos_id = None
    prefix_ids, end_ids, chat_template = (), (), None

    def decode(self, ids):
        return "".join(chr(97 + index % 26) * (1 + index % 2) for index in ids)


@pytest.mark.parametrize("keys", [{}, {"do_sample": True, "temperature": 1.5}])
def test_a_stop_string_ends_the_text_within_tokens(grouped, keys):
    model, config, _ = grouped
    generator = Generator(model, config, Letters())
    (free,) = generator.generate([PROMPTS[0]], options(30, **keys), seed=2)
    assert free.text == Letters().decode(free.tokens)
    stop = free.text[7:11]
    stopping = options(30, stop_strings=("not there", stop), **keys)
    results = generator.generate([PROMPTS[0], PROMPTS[1]], stopping, seed=2)
    end = free.text.index(stop)
    assert (results[0].text, results[0].finish_reason) == (free.text[:end], "stop")
    assert results[0].tokens == free.tokens[: len(results[0].tokens)]
    assert stop in Letters().decode(results[0].tokens)
    assert stop not in Letters().decode(results[0].tokens[:-1])
    assert "".join(generator.stream(PROMPTS[0], stopping, seed=2)) == free.text[:end]


def test_stop_strings_need_a_tokenizer(grouped):
    with pytest.raises(UserError, match="stop_strings needs a tokenizer"):
        grouped[2].generate(PROMPTS, options(3, stop_strings=("a",)))


@pytest.mark.parametrize("key", ["presence_penalty", "frequency_penalty"])
def test_a_large_penalty_writes_every_token_once(grouped, key):
    results = grouped[2].generate(PROMPTS, options(30, **{key: 1000.0}))
    assert all(len(set(result.tokens)) == 30 for result in results)


def test_weights_that_change_are_used_at_once():
    config = tiny_config()
    model = tiny_model(config)
    generator = Generator(model, config)
    before = generator.generate([PROMPTS[0]], options(12))
    names = list(trained_weights(model))
    other = tiny_model(config, seed=1)
    assign(trained_weights(model), {name: item.asnumpy() for name, item in trained_weights(other).items()})
    assert list(trained_weights(model)) == names, "generation does not rename parameters"
    after = generator.generate([PROMPTS[0]], options(12))
    assert after[0].tokens == greedy_without_cache(other, config, PROMPTS[0], 12) != before[0].tokens


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_gives_the_logits_of_the_full_forward(dtype):
    config = tiny_config(n_kv_heads=2, compute_dtype=dtype, seq_length=32)
    model = tiny_model(config)
    (result,) = Generator(model, config).generate([PROMPTS[0]], options(16))
    expected = greedy_without_cache(model, config, PROMPTS[0], 16)
    agreement = next(
        (index for index, pair in enumerate(zip(result.tokens, expected, strict=True)) if len(set(pair)) > 1), 16
    )
    assert agreement >= 8, "the orders of summation differ, but not by more than a close call"


def test_speed_is_counted(grouped):
    model, config, _ = grouped
    generator = Generator(model, config)
    generator.generate(PROMPTS[:2], options(5))
    speed = generator.speed
    assert (speed.prefill_tokens, speed.decode_tokens) == (6, 8)
    assert min(speed.prefill_s, speed.decode_s, speed.compile_s) > 0


@pytest.mark.parametrize(
    ("prompts", "new", "message"),
    [
        ([[]], 4, "the prompt is empty"),
        ([[1], []], 4, "prompt 2 of 2 is empty"),
        ([[VOCABULARY]], 4, f"token {VOCABULARY}, but model.model_config.vocab_size is {VOCABULARY}"),
        ([list(range(60))], 5, "the prompt of 60 .* with 5 new ones .* generation.max_new_tokens=4 at most"),
        ([list(range(64))], 1, "a shorter prompt"),
    ],
)
def test_prompts_that_cannot_be_continued_are_refused(grouped, prompts, new, message):
    with pytest.raises(UserError, match=message):
        grouped[2].generate(prompts, options(new))


def test_the_whole_length_can_be_used(grouped):
    model, config, generator = grouped
    (result,) = generator.generate([PROMPTS[0]], options(config.seq_length - 5))
    assert result.tokens == greedy_without_cache(model, config, PROMPTS[0], config.seq_length - 5)


def test_no_prompts_no_continuations(grouped):
    assert grouped[2].generate([], options(4)) == []


def test_weights_that_are_not_finite_are_an_error_and_not_a_text():
    config = tiny_config()
    model = tiny_model(config)
    weights = trained_weights(model)
    damaged = {name: item.asnumpy() for name, item in weights.items()}
    damaged["model.norm_out.weight"] = np.full_like(damaged["model.norm_out.weight"], np.nan)
    assign(weights, damaged)
    with pytest.raises(RunFailed, match="not finite"):
        Generator(model, config).generate([[1, 2]], options(2))


@pytest.mark.slow
def test_with_graph_kernels(rerun_with_graph_kernels):
    rerun_with_graph_kernels(__file__, "full_forward and grouped")
