"""Results print as their command does, go through JSON, and are escaped in notebooks."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError, dataclass

import pytest

import mindllm
from mindllm.results import Result
from mindllm.terminal.tables import Table, figures, texts
from mindllm.terminal.text import styled

RUN = "configs/llama2/pretrain_llama2_70b_64p.yaml"


@dataclass(frozen=True, repr=False)
class Named(Result):
    """A result with names of users in it."""

    name: str

    def parts(self):
        """Yield a line and two tables."""
        yield styled((self.name, "bold red"))
        yield Table(self.name, [*texts("who"), *figures(self.name)], [(self.name, "1")])
        yield Table("second", texts("other"))

    def tree(self):
        """Return numbers that JSON does not know, too."""
        return {"name": self.name, "far": float("inf"), "pair": (1, 2)}


def test_html_escapes_what_users_wrote():
    page = Named("<script>&\x1b[31m")._repr_html_()
    assert "<script>" not in page
    assert page.count("&lt;script&gt;&amp;\\x1b[31m") == 4
    assert '<td style="text-align:left">' in page
    assert '<td style="text-align:right">1</td>' in page


def test_text_is_text_and_no_markup():
    assert str(Named("[/x] :100:")).splitlines()[0] == "[/x] :100:"


def test_a_dictionary_has_its_version_and_what_json_takes():
    assert Named("x").to_dict() == {"schema": 1, "name": "x", "far": "Infinity", "pair": [1, 2]}


def test_the_table_is_the_first():
    assert [column.name for column in Named("x").table().columns] == ["who", "x"]


def test_a_result_without_a_table_says_so():
    class Bare(Named):
        def parts(self):
            return ("a line",)

    with pytest.raises(LookupError, match="Bare has no table"):
        Bare("x").table()


def test_results_are_frozen_and_short():
    step = mindllm.step_time(RUN)
    with pytest.raises(FrozenInstanceError):
        step.memory = None
    assert len(repr(step)) < 80
    assert "\n" not in repr(step)


def test_a_step_time_is_what_the_command_prints(capsys):
    from mindllm.cli.time import main

    step = mindllm.step_time(RUN, explain=True)
    assert main(["--config", RUN, "--explain"]) == 0
    assert capsys.readouterr().out == f"{step}\n"
    main(["--config", RUN, "--explain", "--json"])
    assert json.loads(capsys.readouterr().out) == step.to_dict() == json.loads(json.dumps(step.to_dict()))
