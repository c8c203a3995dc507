"""What a fine-tuning run is given by model, data and machine: each choice by itself, and the run that all of them make."""

import numpy as np
import pytest
from tiny_chat import conversation, pair, save_tiny_chat_model, write_rows

from mindllm.config import load_config
from mindllm.errors import UserError
from mindllm.recipes import common, device, fit, tuning
from mindllm.recipes.model_source import find_model
from mindllm.recipes.rates import METHODS
from mindllm.recipes.survey import CONVERSATIONS, PAIRS, Survey, survey
from mindllm.recipes.tuning import Tuning, chat_keys, finetune_recipe, method_for

GIB = 1 << 30


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return find_model(save_tiny_chat_model(tmp_path_factory.mktemp("models") / "tiny"))


def data(rows=200, tokens=60, loader=CONVERSATIONS, largest=10, lengths=None):
    found = np.full(min(rows, 2000), tokens) if lengths is None else np.array(lengths)
    return Survey(("/data/chats.jsonl",), loader, "auto" if loader == CONVERSATIONS else "", rows, 0, found, largest)


def made(model, given=None, method="lora", overrides=(), **options):
    one = Tuning(model, given or data(), method, options.pop("output", tuning.Path("out")), overrides, **options)
    return finetune_recipe(one, "mindllm finetune").made(overrides)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_makes_a_run_that_loads_and_is_repeated_by_its_yaml(method, model, tmp_path):
    loader = PAIRS if method in ("dpo", "kto") else CONVERSATIONS
    if method == "qlora":  # of weights in codes; here of others, which differs in nothing that is chosen
        assert method_for(model, loader, "lora") == "lora"
    run = made(model, data(loader=loader), method)
    run.write(path := tmp_path / "finetune.yaml")
    assert load_config(path) == run.config
    assert run.config.run_mode == "finetune"
    assert run.config.is_preference_tuning == (method in ("dpo", "kto"))
    assert run.config.preference.is_unpaired == (method == "kto")
    assert (run.config.model.config.pet_config is None) == (method == "full")


@pytest.mark.parametrize(
    ("lengths", "length", "said"),
    [
        ([60] * 100, 64, "99% of the rows have at most 60 tokens; none is cut"),
        ([65] * 100, 128, "none is cut"),
        ([60] * 99 + [500], 64, "1 are longer and cut"),
        ([900] * 100, 256, "at most 900 tokens, and 256 is the most; 100 are longer and cut"),
    ],
)
def test_the_length_is_a_quantile_rounded_up_and_at_most_the_context(lengths, length, said, model):
    one = Tuning(model, data(100, lengths=lengths), "lora", tuning.Path("out"))
    assert one.length[0] == length
    assert said in one.length[1]


@pytest.mark.parametrize(
    ("rows", "batch", "epochs", "steps"), [(10, 2, 10, 50), (36, 2, 4, 64), (200, 4, 3, 141), (2000, 8, 3, 711)]
)
def test_few_rows_still_make_enough_steps(rows, batch, epochs, steps, model):
    run = made(model, data(rows)).config
    assert (run.global_batch_size, run.runner_config.epochs) == (batch, epochs)
    train = (
        rows
        if run.train_dataset.data_loader.config.split == "1"
        else int(run.train_dataset.data_loader.config.split.split(",")[0])
    )
    assert epochs * (train // batch) == steps
    assert run.do_eval == (rows >= 24)


def test_rows_are_packed_where_padding_is_much_and_steps_stay_enough(model):
    short = [20] * 1000 + [64] * 30
    assert made(model, data(1030, lengths=short)).config.train_dataset.data_loader.config.packing is True
    assert made(model, data(30, lengths=[20] * 27 + [64] * 3)).config.train_dataset.data_loader.config.packing is False
    assert made(model, data(1030, 60)).config.train_dataset.data_loader.config.packing is False


def test_how_conversations_are_written_is_known_before_the_rows_are_read(tmp_path, model):
    key = "--train_dataset.data_loader.config"
    overrides = (f"{key}.chat_template=t.jinja", f"{key}.chat_template_kwargs.enable_thinking=false", "--seq_length=64")
    assert chat_keys(overrides) == {"chat_template": "t.jinja", "chat_template_kwargs": {"enable_thinking": False}}
    assert chat_keys(()) == {}
    rows = write_rows(tmp_path / "rows.jsonl", [{**conversation(0), "tools": [{"function": {"name": "f"}}]}] * 3)
    with pytest.raises(UserError, match="leaves out tool f"):
        survey([rows], model.tokenizer)
    (tmp_path / "t.jinja").write_text(
        "{{ tools | tojson }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    assert survey([rows], model.tokenizer, chat={"chat_template": str(tmp_path / "t.jinja")}).rows == 3


def test_much_padding_is_told_with_what_makes_it_less(model):
    few = Tuning(model, data(30, lengths=[20] * 27 + [64] * 3), "lora", tuning.Path("out"))
    (note,) = few.notes()
    assert note.startswith(
        "62% of every batch is padding: rows have 24 of 64 places on average, and packing them would leave"
    )
    assert "--train_dataset.data_loader.config.packing=true with more --epochs or a smaller --batch_size" in note
    asked = Tuning(model, few.data, "lora", few.output, ("--train_dataset.data_loader.config.packing=false",))
    packed = Tuning(model, data(1030, lengths=[20] * 1000 + [64] * 30), "lora", few.output)
    assert [list(one.notes()) for one in (asked, packed, Tuning(model, data(), "lora", few.output))] == [[]] * 3


def test_what_a_person_asks_for_decides_what_follows_from_it(model):
    overrides = (
        "--batch_size=1",
        "--model.model_config.pet_config.lora_rank=4",
        "--seq_length=96",
        "--learning_rate=1e-3",
    )
    run = made(model, data(2000), overrides=overrides).config
    pet = run.model.config.pet_config
    assert (run.runner_config.batch_size, run.runner_config.gradient_accumulation_steps) == (1, 8)
    assert (pet.lora_rank, pet.lora_alpha) == (4, 8)
    assert run.model.config.seq_length == 96
    assert run.lr_schedule.learning_rate == 1e-3
    assert made(model, overrides=("--gradient_accumulation_steps=2",)).config.runner_config.batch_size == 2
    assert made(model, epochs=7).config.runner_config.epochs == 7
    assert made(model, overrides=("--epochs=7",)).config.runner_config.epochs == 7


def test_a_wrong_key_is_told_as_in_any_run(model):
    with pytest.raises(UserError, match="did you mean 'lora_rank'"):
        made(model, overrides=("--model.model_config.pet_config.lora_rnk=4",))


def test_rows_at_a_time_follow_the_memory_that_is_free(model, monkeypatch):
    needs = {
        rows: fit.needed_bytes(made(model, data(2000), overrides=(f"--batch_size={rows}",)).config)
        for rows in (1, 2, 4)
    }
    assert needs[1] < needs[2] < needs[4]
    for budget, rows in ((needs[4], 4), (needs[4] - 1, 2), (needs[2] - 1, 1)):
        monkeypatch.setattr(fit, "budget_of", lambda config, budget=budget: budget)
        run = made(model, data(2000)).config
        assert (run.runner_config.batch_size, run.global_batch_size) == (rows, 8)
        assert not run.recompute_config.recompute
    monkeypatch.setattr(fit, "budget_of", lambda config: needs[1] - 1)
    assert made(model, data(2000)).config.recompute_config.recompute is True
    monkeypatch.setattr(fit, "budget_of", lambda config: GIB // 2)
    with pytest.raises(UserError, match=r"with one row at a time, and there are 0.5 GB for it; take a smaller model;"):
        made(model, data(2000))
    assert made(model, data(2000), overrides=("--batch_size=1",)).config.runner_config.batch_size == 1


def test_adapters_are_advised_where_all_weights_do_not_fit(model, monkeypatch):
    monkeypatch.setattr(fit, "budget_of", lambda config: GIB // 2)
    with pytest.raises(UserError, match="take adapters"):
        made(model, method="full")


def test_several_devices_share_the_rows(model, monkeypatch, tmp_path):
    for number in range(9):
        (tmp_path / f"davinci{number}").touch()
    (tmp_path / "davinci_manager").touch()
    monkeypatch.setattr(device, "DEVICES", (tmp_path, device.DEVICES[1]))
    assert device.devices_here() == 9
    run = made(model, data(2000), method="full").config
    assert (run.context.device_target, run.parallel_config.data_parallel, run.global_batch_size) == ("Ascend", 8, 8)
    assert run.use_parallel
    assert run.parallel.enable_parallel_optimizer
    assert not made(model, data(2000)).config.parallel.enable_parallel_optimizer


@pytest.mark.parametrize(("here", "used"), [(0, 1), (1, 1), (3, 2), (5, 4), (8, 8), (15, 8), (24, 24)])
def test_devices_are_as_many_as_are_compiled_for(here, used):
    assert common.usable_devices(here) == used


@pytest.mark.parametrize(
    ("loader", "asked", "said"),
    [
        (PAIRS, "lora", "write --method dpo"),
        (CONVERSATIONS, "dpo", "these are conversations"),
        (CONVERSATIONS, "kto", r"learns from answers with a label \(true or false\), or from pairs"),
        (CONVERSATIONS, "qlora", "has no weights in codes; make them first"),
    ],
)
def test_a_method_that_does_not_go_with_model_or_data_is_told(loader, asked, said, model):
    with pytest.raises(UserError, match=said):
        method_for(model, loader, asked)


def test_the_method_follows_from_the_data(model):
    assert (method_for(model, PAIRS, ""), method_for(model, CONVERSATIONS, "")) == ("dpo", "lora")
    assert (method_for(model, PAIRS, "kto"), method_for(model, PAIRS, "", labelled=True)) == ("kto", "kto")
    with pytest.raises(UserError, match="these are answers with a label, desirable or not; write --method kto"):
        method_for(model, PAIRS, "dpo", labelled=True)


def test_the_tokenizer_of_another_model_is_told(model):
    with pytest.raises(UserError, match="gives token 5000 to these rows, and the model has 300"):
        made(model, data(largest=5000))


def test_real_files_make_real_figures(model, tmp_path):
    chats = survey([write_rows(tmp_path / "chats.jsonl", map(conversation, range(40)))], model.tokenizer)
    pairs = survey([write_rows(tmp_path / "pairs.jsonl", map(pair, range(40)))], model.tokenizer)
    run = made(model, chats).config
    assert run.train_dataset.data_loader.config.data_path == str(tmp_path / "chats.jsonl")
    assert run.model.config.seq_length % 64 == 0
    assert made(model, pairs, "dpo").config.preference.beta == 0.1
