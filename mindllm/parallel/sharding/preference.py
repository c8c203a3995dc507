"""Layouts of the loss of pairs: every pair is where its row is, and figures of it are added over all."""

from __future__ import annotations

from collections.abc import Iterator

from mindspore import nn

from mindllm.config.parallel import ParallelConfig
from mindllm.finetune.preference import (
    FIGURES,
    HingeLoss,
    IpoLoss,
    OddsRatioLoss,
    PairLosses,
    PreferenceLoss,
    SigmoidLoss,
    SimpoLoss,
)
from mindllm.finetune.unpaired import UNPAIRED_FIGURES, UnpairedLosses
from mindllm.parallel.layout import Dimension, Layout
from mindllm.parallel.sharding.cells import SPREAD, TOKENS
from mindllm.parallel.sharding.table import Table, on

PAIRS: Dimension = "dp"
SCALAR: Layout = ()
ROWS: Layout = (PAIRS, None)
PER_PAIR: Layout = (PAIRS,)


def pairs_table(cell: PairLosses | UnpairedLosses) -> Table:
    """Shardings of the operators below the cell, by their paths from it."""
    if isinstance(cell, UnpairedLosses):
        return {**_counted(len(UNPAIRED_FIGURES) + 1), **_unpaired(cell)}
    table: Table = {
        **_counted(len(FIGURES) + 1),
        "is_answer": on(ROWS, SCALAR),
        "is_rejected": on(ROWS, SCALAR),
        "of_rejected": on(ROWS, ROWS),
        "of_chosen": on(ROWS, ROWS),
        "gain": on(ROWS, ROWS) if cell.compares else on(ROWS),
        "mask": on(ROWS, ROWS),
        "sum": on(ROWS),
        "negative": on(PER_PAIR),
        "margin": on(PER_PAIR, PER_PAIR),
        "weigh": on(PER_PAIR, PER_PAIR),
        "sum_pairs": on(PER_PAIR),
        "reward": on(PER_PAIR, SCALAR),
        "is_right": on(PER_PAIR, PER_PAIR),
        **_loss("loss", cell.loss),
    }
    if cell.means:
        table |= {"at_least_one": on(PER_PAIR, SCALAR), "mean": on(PER_PAIR, PER_PAIR)}
    return table


def _counted(figures: int) -> Table:
    """Return layouts of the cell that counts figures of every row."""
    return {
        "largest_label": on(ROWS, SCALAR),
        "join": on(*[ROWS] * figures),
        "count": on(ROWS, ROWS),
        "times_probe": on(ROWS, (None,)),
        "sum_counts": on(ROWS),
        "add_nothing": on(SCALAR, SCALAR),
    }


def _unpaired(cell: UnpairedLosses) -> Table:
    table = {
        **dict.fromkeys(("is_answer", "is_other"), on(ROWS, SCALAR)),
        **dict.fromkeys(("of_other", "of_own", "gain", "mask"), on(ROWS, ROWS)),
        "at_second": on(ROWS, (None, None)),
        "sum": on(ROWS),
        **dict.fromkeys(("desirable", "sign", "against", "weights", "weigh"), on(PER_PAIR, PER_PAIR)),
        **dict.fromkeys(("scale", "weigh_desirable", "weigh_undesirable", "reward"), on(PER_PAIR, SCALAR)),
        **dict.fromkeys(("sigmoid", "sum_losses", "negative"), on(PER_PAIR)),
        "figure": on(PER_PAIR, PER_PAIR),
    }
    if cell.estimates:
        table |= {
            "weigh_other": on(PER_PAIR, PER_PAIR),
            "sum_rows": on(PER_PAIR),
            **dict.fromkeys(("at_least_one", "mean", "not_negative"), on(SCALAR, SCALAR)),
            **dict.fromkeys(("beyond", "share"), on(PER_PAIR, SCALAR)),
        }
    return table


def crossing_tables(pairs_loss: PreferenceLoss, parallel: ParallelConfig) -> Iterator[tuple[nn.Cell, Table]]:
    """Yield the cells by which both models' hidden states go from stage to stage, each with the shardings of its operators.

    Hidden states are cut by tokens, as those between layers, and not by their width.
    """
    states: Layout = (SPREAD if parallel.use_seq_parallel else TOKENS, None)
    for join, parts in zip(pairs_loss.joins, pairs_loss.parts, strict=True):
        yield join, {"join": on(states, states)}
        yield parts, {"ours": on(states), "theirs": on(states)}


def _loss(at: str, cell: SigmoidLoss | HingeLoss | IpoLoss | SimpoLoss | OddsRatioLoss) -> Table:
    if isinstance(cell, SimpoLoss):
        return {f"{at}.add": on(PER_PAIR, SCALAR), **_loss(f"{at}.sigmoid", cell.sigmoid)}
    if isinstance(cell, OddsRatioLoss):
        return {
            **{f"{at}.{name}": on(PER_PAIR, SCALAR) for name in ("bound", "share")},
            **{f"{at}.{name}": on(PER_PAIR) for name in ("exp", "log")},
            **{f"{at}.{name}": on(PER_PAIR, PER_PAIR) for name in ("log_odds", "ratio", "add")},
            f"{at}.rest": on(SCALAR, PER_PAIR),
            **_loss(f"{at}.sigmoid", cell.sigmoid),
        }
    operators: dict[type, tuple[str, ...]] = {
        SigmoidLoss: ("negative", "exp", "log"),
        HingeLoss: ("relu",),
        IpoLoss: ("square",),
    }
    by_number = {SigmoidLoss: ("scale", "larger"), HingeLoss: ("scale", "add"), IpoLoss: ("add",)}
    table = {f"{at}.{name}": on(PER_PAIR) for name in operators[type(cell)]}
    table |= {f"{at}.{name}": on(PER_PAIR, SCALAR) for name in by_number[type(cell)]}
    if isinstance(cell, SigmoidLoss):
        table |= {f"{at}.{name}": on(PER_PAIR, PER_PAIR) for name in ("sub", "sum", "back")}
        if cell.smoothing:
            table |= {f"{at}.share": on(PER_PAIR, SCALAR), f"{at}.smooth": on(PER_PAIR, PER_PAIR)}
    return table
