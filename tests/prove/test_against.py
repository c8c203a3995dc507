"""Two proofs held against each other: what changed in words, what is worse by a share, and what is not compared."""

import pytest

from mindllm.prove.against import compare
from mindllm.prove.answers import Standing
from mindllm.prove.questions import COMMUNICATION, DATA, MEMORY, PARITY, STEP_TIME
from mindllm.units import GB, GIB
from tests.prove.made_proofs import WORDS, figures, proof


def against(later, **earlier):
    return compare(proof(known=figures(**earlier)), later)


def test_nothing_changed():
    found = against(proof())
    assert (found.changes, found.turned, found.words, found.summary()) == ((), (), {}, "no figure changed")
    assert not found.worse_by(0)
    assert str(found) == "since 2026-11-20: no figure changed"


def test_what_became_better_or_worse_in_a_line():
    later = figures([41.4 * GIB, 43.1 * GIB], step=29.184, mfu=0.415, exchanged=20, checkpoint=90 * GB)
    found = against(proof(known=later))
    assert found.summary() == (
        "stage 1 +3.1 GB, step -4.0%, MFU +1.5 points, exchanges nobody asked for +20.0 MB, a checkpoint -10.0 GB"
    )
    assert [change.better for change in found.changes] == [False, True, True, False, True]


@pytest.mark.parametrize(
    ("later", "share", "worse"),
    [
        ({"step": 31.0}, 0.01, True),
        ({"step": 31.0}, 0.02, False),
        ({"step": 20.0, "stages": [43 * GIB, 40 * GIB]}, 0.02, True),
        ({"stages": [41.4 * GIB, 41.4 * GIB]}, 0.0, False),  # the fullest is as full as before
        ({"exchanged": 1000}, 0.0, False),  # told, but what it costs is in the step
    ],
)
def test_worse_is_by_more_than_a_share_of_peak_or_step(later, share, worse):
    assert against(proof(known=figures(**later))).worse_by(share) is worse


@pytest.mark.parametrize("standing", [Standing.REFUTED, Standing.NOT_PROVED])
def test_what_was_proved_and_is_no_longer_is_worse(standing):
    found = against(proof({PARITY: standing}))
    (turned,) = found.turned
    assert (turned.question, turned.before, turned.after) == (PARITY, Standing.PROVED, standing)
    assert found.worse_by(1.0)
    assert "parity says so" in str(found)
    assert not compare(proof({PARITY: standing}), proof()).worse_by(0)
    assert against(proof({PARITY: standing}, allowed=(PARITY,))).worse_by(1.0) is (standing is Standing.REFUTED)


def test_other_numbers_of_stages_are_compared_by_the_fullest():
    found = against(proof(known=figures([50 * GIB] * 4)))
    assert found.summary() == "fullest stage +8.6 GB"


def test_what_a_formula_expects_is_not_held_against_a_dry_run():
    quick = proof(
        {MEMORY: Standing.EXPECTED, STEP_TIME: Standing.EXPECTED}, known=figures([90 * GIB], step=90.0), complete=False
    )
    found = against(quick)
    assert found.changes == ()
    assert not found.worse_by(0)
    assert against(proof({DATA: Standing.REFUTED}, complete=False)).worse_by(1.0)
    slower = compare(quick, proof({MEMORY: Standing.EXPECTED}, known=figures([91 * GIB])))
    assert slower.summary() == "stage 0 +1.0 GB"


def test_proofs_that_lack_figures_are_compared_by_what_they_have():
    found = compare(proof(known={}), proof({COMMUNICATION: Standing.NOT_PROVED}))
    assert (found.changes, found.worse_by(0)) == ((), True)


def test_what_of_the_run_changed_is_told():
    later = proof(words={**WORDS, "devices": "32 (Ascend)", "batch": "8"}, device="atlas_900_a3")
    found = against(later)
    assert found.words == {
        "devices": ("16 (Ascend)", "32 (Ascend)"),
        "batch": ("not said", "8"),
        "timed on": ("atlas_800t_a2", "atlas_900_a3"),
    }
    assert "devices: 32 (Ascend) (was: 16 (Ascend))" in str(found)
    assert found.to_dict()["words"]["timed on"] == ["atlas_800t_a2", "atlas_900_a3"]
