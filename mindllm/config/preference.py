"""Section ``preference``: how a model learns from pairs of answers, of which one was preferred.

DPO: Rafailov et al., 2023; hinge: Zhao et al., 2023 (SLiC-HF); IPO: Azar et al., 2023; label smoothing: Mitchell, 2023 (cDPO).
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mindllm.config.section import Section


class PreferenceConfig(Section):
    """The loss of a pair, from how much likelier than the reference the model makes the chosen answer and the rejected one."""

    loss_type: Literal["sigmoid", "hinge", "ipo"] = Field(
        default="sigmoid",
        description="sigmoid: DPO; hinge: SLiC; ipo: IPO, with means over the tokens of an answer in place of sums.",
    )
    beta: float = Field(
        default=0.1, gt=0, description="How far the model may go from the reference: smaller, farther. ipo: its τ."
    )
    label_smoothing: float = Field(
        default=0.0,
        ge=0,
        lt=0.5,
        description="`loss_type: sigmoid`: part of the pairs taken to be the wrong way round.",
    )
