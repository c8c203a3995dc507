"""What MindFormers itself takes for a YAML of its own, beside the run that is made of it here."""

import pytest
from small_cluster import cluster_run

from mindllm.config import load_config
from mindllm.timing.configured import mindformers_workload, workload_of
from mindllm.timing.device import DEFAULT, read_device
from mindllm.timing.prediction import predict
from tests.mindformers.mindformers_files import LEGACY, writer

DEVICE = read_device(DEFAULT)
SMALL = {"model.model_config." + key: value for key, value in {"num_layers": 2, "seq_length": 8192}.items()}


@pytest.mark.parametrize(
    ("said", "reads", "size"),
    [
        ({"param_init_type": ...}, True, 2),
        ({"use_attn_mask_compression": True, "param_init_type": "float16"}, False, 2),
        ({"use_attn_mask_compression": False, "param_init_type": "float32"}, True, 4),
        ({"use_flash_attention": False, "param_init_type": "bfloat16"}, False, 2),
    ],
)
def test_a_yaml_of_mindformers_says_what_its_own_program_reads_and_exchanges(tmp_path, said, reads, size):
    config = load_config(
        writer(tmp_path)(LEGACY, SMALL | {f"model.model_config.{key}": value for key, value in said.items()})
    )
    ours, theirs = workload_of(config).numerics, mindformers_workload(config).numerics
    assert (theirs.reads_masks, theirs.gradient_bytes) == (reads, size)
    assert (ours.reads_masks, ours.gradient_bytes) == (False, size)
    predicted = predict(config, DEVICE)
    assert predicted.tree()["seconds_in_mindformers"] == predicted.in_mindformers.seconds
    assert (predicted.in_mindformers.seconds > predicted.seconds) == reads


def test_a_softmax_in_half_precision_and_a_kernels_dropout_are_faster(tmp_path):
    def told(**said):
        keys = {"hidden_dropout_rate": 0.1, "attention_dropout_rate": 0.1, "use_flash_attention": False, **said}
        told_of_model = {f"model.model_config.{key}": value for key, value in keys.items()}
        return predict(load_config(writer(tmp_path)(LEGACY, told_of_model)), DEVICE)

    half, single = told(softmax_compute_type="float16"), told(softmax_compute_type="float32")
    assert half.seconds < 0.9 * single.seconds
    assert half.in_mindformers.seconds < half.seconds
    assert "a kernel draws and applies dropout" in str(half)


def test_a_yaml_of_ours_has_no_other_program():
    config = cluster_run()
    assert mindformers_workload(config) is None
    assert predict(config, DEVICE).tree()["seconds_in_mindformers"] is None
