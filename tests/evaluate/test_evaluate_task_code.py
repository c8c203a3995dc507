"""Python that YAMLs of others name does not run unasked, however they name it; what is not Python needs no asking."""

from pathlib import Path

import pytest

pytest.importorskip("lm_eval")

from mindllm.config.generation import EvaluationConfig
from mindllm.errors import UserError
from mindllm.evaluate import run
from mindllm.evaluate.run import _quiet, find_tasks
from mindllm.evaluate.task_code import python_in

PLAIN = """task: mine
dataset_path: json
dataset_kwargs: {data_files: {test: rows.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
doc_to_choice: [a, b]
"""
EVIL = "open('ran', 'w').close()\ndef hook(*given, **named):\n    return given[0]\n"
GROUP = "group: all_of_mine\ntask:\n  - {group: inner, task: [{task: mine, num_fewshot: 0}]}\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A directory of tasks with a file of Python beside them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "_folders", lambda names: [run.PUBLIC_TASKS / "gsm8k"])  # to find them takes seconds
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "evil.py").write_text(EVIL)
    (folder / "group.yaml").write_text(GROUP)
    yield folder
    assert not Path("ran").exists()


def find(name="mine", confirmed=False):
    return find_tasks([name], EvaluationConfig(include_path="tasks", confirm_run_unsafe_code=confirmed))


WAYS = {
    "process_docs: !function evil.hook": "!function evil.hook",
    "process_docs: !function os.system": "!function os.system",
    "metric_list: [{metric: !function evil.hook, aggregation: mean}]": "!function evil.hook",
    "metric_list: [{metric: acc, aggregation: !function evil.hook}]": "!function evil.hook",
    "filter_list: [{name: f, filter: [{function: !function evil.hook}]}]": "!function evil.hook",
    "fewshot_config: {sampler: !function evil.hook}": "!function evil.hook",
    "custom_dataset: !function evil.hook": "!function evil.hook",
    "class: !function evil.hook": "!function evil.hook",
    "class: evil.hook": "class: evil.hook",
    "metric_list: [{metric: ./evil.py}]": "metric: ./evil.py",
    "metric_list: [{metric: acc, hf_evaluate: true}]": "hf_evaluate: true",
    "dataset_path: pandas": "dataset_path: pandas",
    "metadata: &a {again: *a, hook: !function evil.hook}": "!function evil.hook",
}


@pytest.mark.parametrize(("line", "named"), WAYS.items(), ids=WAYS)
def test_every_way_to_name_python_asks_with_file_line_and_tag(line, named, folder):
    key = line.partition(":")[0]
    lines = [kept for kept in PLAIN.splitlines() if not kept.startswith(f"{key}:")]
    (folder / "mine.yaml").write_text("\n".join([*lines, "tag: some_tag", line]))
    for name in ("mine", "all_of_mine", "some_tag"):
        with pytest.raises(UserError) as told:
            find(name)
        assert str(told.value).startswith(f"{folder / 'mine.yaml'}:{len(lines) + 2}: {named}")
        assert "--confirm_run_unsafe_code" in str(told.value)
        assert told.value.exit_code == 2
    find(confirmed=True)


def test_a_tag_that_only_another_reader_would_take_for_python_is_named(folder):
    (folder / "mine.yaml").write_text("metadata: !!python/object/apply:os.getcwd []\n")
    assert list(python_in(folder / "mine.yaml")) == [(1, "!!python/object/apply:os.getcwd")]


def test_what_is_included_is_looked_at_wherever_it_lies(folder, tmp_path):
    (tmp_path / "base.yaml").write_text("include: [further]\n")
    (tmp_path / "further").write_text("\nprocess_docs: !function tasks.evil.hook\n")
    (folder / "mine.yaml").write_text(f"include: {tmp_path / 'base.yaml'}\n{PLAIN}")
    with pytest.raises(UserError, match=r"/further:2: !function tasks\.evil\.hook: task mine"):
        find()


def test_a_group_of_others_that_overrides_a_public_task_is_looked_at(folder):
    (folder / "group.yaml").write_text("group: g\ntask: [{task: gsm8k, process_docs: !function evil.hook}]\n")
    with pytest.raises(UserError, match=r"group.yaml:2: !function evil\.hook: task g"):
        find("g")


def test_a_yaml_of_others_may_take_the_place_of_a_public_task_and_is_looked_at(folder):
    (folder / "gsm8k.yaml").write_text(PLAIN.replace("mine", "gsm8k") + "process_docs: !function evil.hook\n")
    with pytest.raises(UserError, match=r"gsm8k.yaml:9: !function"):
        find("gsm8k")


def test_plain_yamls_and_those_of_the_harness_need_no_asking(folder):
    public = "group: public\ntask: [gsm8k, mine]\n"  # gsm8k.yaml and its like may name functions of the harness
    (folder / "public.yaml").write_text(public)
    (folder / "mine.yaml").write_text(PLAIN + "metric_list: [{metric: acc, aggregation: mean}]\n")
    (folder / "other.yaml").write_text(PLAIN.replace("mine", "other") + "process_docs: !function evil.hook\n")
    assert {"mine", "public"} <= set(find("public").task_index)
    find("modellink_boolq")


@pytest.mark.parametrize("template", ["{{ cycler.__init__.__globals__.os.getcwd() }}", "{{ ''.__class__.__mro__ }}"])
def test_templates_reach_nothing_behind_underscores(template, tmp_path):
    from jinja2.exceptions import SecurityError
    from lm_eval.utils import apply_template

    with _quiet():
        assert apply_template("{{ [a] | join }}{{ a | regex_replace('x', 'y') }}\n", {"a": "x"}) == "xy\n"
        with pytest.raises(SecurityError):
            apply_template(template, {})
    assert apply_template(template, {})  # the harness' own: what this test would not notice otherwise
