"""Section ``preference``: how a model learns from pairs of answers, of which one was preferred.

DPO: Rafailov et al., 2023; hinge: Zhao et al., 2023 (SLiC-HF); IPO: Azar et al., 2023; label smoothing: Mitchell, 2023 (cDPO);
ORPO: Hong et al., 2024; SimPO: Meng et al., 2024. Of answers that are each good or bad by itself: KTO: Ethayarajh et al., 2024;
APO-zero: D'Oosterlinck et al., 2024.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mindllm.config.section import Section


class PreferenceConfig(Section):
    """The loss of a pair, from how much likelier than the reference the model makes the chosen answer and the rejected one.

    ORPO and SimPO have no reference: how likely the answers are decides.
    """

    loss_type: Literal["sigmoid", "hinge", "ipo", "orpo", "simpo", "kto", "apo_zero_unpaired"] = Field(
        default="sigmoid",
        description="sigmoid: DPO; hinge: SLiC; ipo: IPO, with means over the tokens of an answer in place of sums; orpo, simpo: "
        "such means without a reference, so that all weights may be trained. kto, apo_zero_unpaired: rows of one answer each, "
        "which is desirable or not; pairs become two such rows.",
    )
    beta: float = Field(
        default=0.1,
        gt=0,
        description="How far the model may go from the reference: smaller, farther. ipo: its τ; orpo: its λ, the weight of the "
        "odds ratio; simpo: what log-probabilities are multiplied by, 2 to 10 in the paper.",
    )
    simpo_gamma: float = Field(
        default=0.5, ge=0, description="`loss_type: simpo`: by how much the chosen answer's reward should be larger."
    )
    label_smoothing: float = Field(
        default=0.0,
        ge=0,
        lt=0.5,
        description="`loss_type: sigmoid`: part of the pairs taken to be the wrong way round.",
    )

    desirable_weight: float = Field(
        default=1.0,
        gt=0,
        description="`loss_type: kto`, `apo_zero_unpaired`: weight of the losses of desirable answers.",
    )
    undesirable_weight: float = Field(default=1.0, gt=0, description="The same of the other answers.")

    @property
    def is_unpaired(self) -> bool:
        """Whether a row has one answer, which is desirable or not."""
        return self.loss_type in ("kto", "apo_zero_unpaired")

    @property
    def estimates_divergence(self) -> bool:
        """Whether rows have another row's answer, too, by which the distance from the reference is estimated."""
        return self.loss_type == "kto"

    @property
    def has_reference(self) -> bool:
        """Whether the model is compared with what it was before."""
        return self.loss_type not in ("orpo", "simpo")
