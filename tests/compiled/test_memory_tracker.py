"""What a block of memory is there for, in the programs of others as in ours."""

import pytest

from mindllm.compiled.simulation.memory_tracker import category
from mindllm.compiled.simulation.simulation import ACTIVATIONS, COMMUNICATION, GRADIENTS, OPTIMIZER, OTHER, WEIGHTS

MINDFORMERS = "Default/network-MFPipelineWithLossScaleCell/"
BACKWARD = "Gradients/Default/network-Net/first-Dense/Grad_MatMul/MatMul-op0"


@pytest.mark.parametrize(
    ("kind", "node", "users", "expected"),
    [
        ("Weight", "adam_m.decoder.layers.0.mlp.linear_fc1.weight", [], OPTIMIZER),
        ("Weight", "moments.first.weight", [], OPTIMIZER),
        ("Weight", "exp_avg_sq.first.weight", [], OPTIMIZER),
        ("Weight", "accu_grads.embedding.word_embeddings.weight", [], GRADIENTS),
        ("Weight", "embedding.word_embeddings.weight", [], WEIGHTS),
        ("Kernel", MINDFORMERS + "optimizer-AdamW/Mul-op0", [], OPTIMIZER),
        ("Kernel", MINDFORMERS + "clip_grad_norm-ClipGradNorm/Mul-op3", [], OPTIMIZER),
        ("Kernel", "Default/optimizer-Momentum/ApplyMomentum-op0", [], OPTIMIZER),
        (
            "Kernel",
            "Default/Mul-op2",
            ["Default/update-ApplyGradients/optimizer-AdamW/kernel-FusedAdam/Sub-op4"],
            OPTIMIZER,
        ),
        ("Kernel", "Default/Mul-op2", ["Default/network-Net/first-Dense/MatMul-op0"], ACTIVATIONS),
        ("Kernel", BACKWARD, ["Default/optimizer-Momentum/ApplyMomentum-op0"], GRADIENTS),
        ("Kernel", BACKWARD, ["Gradients/Default/network-Net/Grad_ReLU/ReluGrad-op0"], ACTIVATIONS),
        ("Kernel", "Default/network-Net/AllGather-op0", [], COMMUNICATION),
        ("ConstantValue", "Default/data-0", [], OTHER),
    ],
)
def test_categories(kind, node, users, expected):
    assert category(kind, node, users) == expected
