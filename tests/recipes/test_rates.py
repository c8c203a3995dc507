"""The table of what is chosen for a run: complete for every method, and shown in the docs as it is."""

from pathlib import Path

import pytest

from mindllm.cli.train import METHODS as OFFERED
from mindllm.config import RunConfig
from mindllm.config.reading.document import at
from mindllm.recipes.device import ASCEND, CPU
from mindllm.recipes.rates import METHODS, PRETRAIN, TABLE, TUNING, Case, figure, keys_of, rate, table

PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"
ALL = {row.name for row in TABLE if not row.is_key}


def case(method="lora", parameters=1e9, rows=1000, device=CPU):
    return Case(method, parameters, rows, device)


def rows_of_the_page():
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| `")]


def test_the_docs_show_the_table():
    shown = [
        [f"`{name}`", *(text.plain for text in rest)]
        for name, *rest in ([row[0].plain, *row[1:]] for row in table().rows)
    ]
    assert rows_of_the_page() == shown


@pytest.mark.parametrize("device", [CPU, ASCEND])
@pytest.mark.parametrize("method", [*METHODS, PRETRAIN])
def test_every_method_has_every_figure_at_every_size(method, device):
    needed = {name for name in ALL for row in TABLE if row.name == name and (not row.methods or method in row.methods)}
    for parameters, rows in ((1e6, 1), (7e9, 5000), (4e11, 1e8)):
        for name in needed:
            assert figure(name, case(method, parameters, rows, device)) is not None
        assert rate("lr_schedule.learning_rate", case(method, parameters, rows, device)).value > 0


def test_the_methods_are_those_of_the_command_line():
    assert sorted(OFFERED) == sorted(METHODS) == sorted(TUNING)


def test_every_row_can_count():
    """None is hidden behind an earlier one of its name."""
    sizes = [1e6, 1e8, 3e8, 1e9, 5e9, 2e10, 1e12]
    rows = [1, 100, 1000, 1e5, 1e8, 1e12]
    cases = [Case(m, p, r, d) for m in (*METHODS, PRETRAIN) for p in sizes for r in rows for d in (CPU, ASCEND)]
    counted = {id(rate(row.name, one)) for row in TABLE for one in cases if row.holds(one)}
    assert [row for row in TABLE if id(row) not in counted] == []


def test_every_key_is_one_of_a_run():
    """In a section that pydantic would refuse a misspelt key of."""
    known = RunConfig.model_json_schema()
    for row in (row for row in TABLE if row.is_key):
        section, key = row.name.rpartition(".")[::2]
        names = str(at(known, ("$defs",)))
        assert f"'{key}'" in names, row.name
        assert section.split(".")[0] in known["properties"], row.name


@pytest.mark.parametrize(
    ("method", "parameters", "wanted"),
    [
        ("lora", 1e9, 2e-4),
        ("lora", 7e9, 1e-4),
        ("full", 7e9, 1e-5),
        ("dpo", 1e8, 5e-6),
        (PRETRAIN, 1e8, 6e-4),
        (PRETRAIN, 7e9, 1.2e-4),
    ],
)
def test_rates_by_method_and_size(method, parameters, wanted):
    assert rate("lr_schedule.learning_rate", case(method, parameters)).value == wanted


def test_a_source_stands_behind_a_reason_and_keys_come_once():
    assert rate("lr_schedule.learning_rate", case()).why == (
        "adapters; small models take a larger rate (Dettmers et al., 2023 (QLoRA), table 9)"
    )
    names = [row.name for row in keys_of(case())]
    assert len(names) == len(set(names))
