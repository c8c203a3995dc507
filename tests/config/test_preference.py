"""Section ``preference``: what pairs of answers are learnt with, and what is refused."""

from __future__ import annotations

import pytest

from mindllm.parallel.context import input_columns
from mindllm.train.compile_cache import step_key

PAIRS = [
    "--train_dataset.data_loader.type=PreferenceDataLoader",
    "--processor.tokenizer.vocab_file=t.json",
    "--model.model_config.pet_config={lora_rank: 4}",
]
LOADER = "train_dataset.data_loader.type"
PET = "model.model_config.pet_config"


def test_pairs_need_no_section_and_have_the_columns_of_documents(load):
    config = load(*PAIRS)
    assert config.is_preference_tuning
    assert config.preference.beta == 0.1
    assert input_columns(config)[3:] == ("segment_starts", "position_ids")


@pytest.mark.parametrize(
    ("options", "key", "words"),
    [
        (["--preference.beta=0.2"], LOADER, "pairs of answers are of type PreferenceDataLoader"),
        ([*PAIRS[:2]], PET, "pairs are learnt by adapters"),
        ([*PAIRS, f"--{PET}={{pet_type: full}}"], f"{PET}.pet_type", "pairs are learnt by adapters"),
        ([*PAIRS, f"--{PET}.modules_to_save=[norm_out]"], f"{PET}.modules_to_save", "the reference is the base"),
        ([*PAIRS, "--preference={loss_type: ipo, label_smoothing: 0.1}"], "preference.label_smoothing", "of loss_type"),
        ([*PAIRS, "--preference.simpo_gamma=0.1"], "preference.simpo_gamma", "is of loss_type simpo, not sigmoid"),
        ([*PAIRS, "--preference.beta=0"], "preference.beta", "greater than 0"),
        ([*PAIRS, "--preference.desirable_weight=2"], "preference.desirable_weight", "of loss_type kto"),
        (
            [*PAIRS, "--preference={loss_type: orpo, undesirable_weight: 2}"],
            "preference.undesirable_weight",
            "of loss_type kto or apo_zero_unpaired, not orpo",
        ),
        ([*PAIRS[:2], "--preference.loss_type=kto"], PET, "pairs are learnt by adapters"),
        (
            [*PAIRS, "--run_mode=eval", "--load_checkpoint=x", "--train_dataset.data_loader.config.split=1,1"],
            LOADER,
            "do_eval",
        ),
        (
            [*PAIRS, "--use_parallel", "--parallel_config.context_parallel=2"],
            "parallel_config.context_parallel",
            "are not learnt from parts of their sequences yet",
        ),
    ],
)
def test_refused(refused, options, key, words):
    message = refused(*options)
    assert f": {key}: " in message
    assert words in message


def test_predicting_needs_no_adapters_in_the_yaml(load):
    assert load(*PAIRS[:2], "--run_mode=predict", "--load_checkpoint=x").is_preference_tuning


def test_the_reference_is_counted_as_work(load):
    pairs, plain = load(*PAIRS), load(*PAIRS[1:])
    model = plain.model.config
    assert pairs.flops_per_token() == plain.flops_per_token() + model.base.flops_per_token() / 3


def test_a_compiled_step_is_that_of_its_loss(load):
    assert step_key(load(*PAIRS)) != step_key(load(*PAIRS, "--preference.beta=0.2"))
