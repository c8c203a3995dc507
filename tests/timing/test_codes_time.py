"""Bases in codes: matrices are made of them twice in a step, whatever is recomputed, and they are held as the bytes they have."""

import pytest

from mindllm.config import RecomputeConfig
from mindllm.config.model import ModelConfig
from mindllm.errors import UserError
from mindllm.families import with_file_names
from mindllm.parallel.layer_plan import read_plan
from mindllm.timing.costs.layer import HELD
from mindllm.timing.costs.work import Operator
from mindllm.timing.device import DEFAULT, read_device
from mindllm.timing.memory import stage_bytes
from mindllm.timing.step import step_time
from mindllm.timing.step_work import step_work
from mindllm.timing.workload import Strategy, Workload

SIZES = {"vocab_size": 32000, "hidden_size": 4096, "num_heads": 32, "intermediate_size": 11008, "seq_length": 2048}
LORA = {"lora_rank": 8, "frozen_dtype": "bfloat16"}
NF4 = {"quant_method": "bitsandbytes", "code": "nf4", "group_size": 64}
GPTQ = {"quant_method": "gptq", "code": "uint4", "group_size": 128}


def workload(codes, recompute=False, ways=1):
    sections = {"pet_config": LORA, "quantization_config": codes}
    model = ModelConfig.model_validate({**SIZES, "num_layers": 2, **sections})
    architecture = with_file_names(model).architecture
    section = RecomputeConfig.model_validate({"recompute": recompute})
    plan = read_plan([[2]], section, lambda key, said: UserError(key + said))
    return Workload(architecture, SIZES["seq_length"], Strategy(model_parallel=ways), plan)


def made(work):
    return [one for one in work if isinstance(one, Operator) and one.name.endswith(HELD)]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("codes", "launched", "passes"), [(NF4, 4, 8 + 6), (GPTQ, 5, 8 + 8 + 6)])
def test_a_matrix_is_made_of_its_codes_forward_and_once_more(recompute, codes, launched, passes):
    run = workload(codes, recompute)
    part = next(part for key, part in step_work(run).parts.items() if not isinstance(key, str))
    numbers = sum(code.out_features * code.in_features for code in run.architecture.layers[0].codes)
    for work in (part.forward, part.repeated):
        assert len(made(work)) == 7 * launched
        assert sum(one.bytes for one in made(work)) == numbers * (0.5 * 9 + 4 + passes)
    assert made(part.backward) == []


def test_tensor_parallel_ranks_make_their_parts():
    sums = []
    for ways in (1, 4):
        parts = step_work(workload(NF4, ways=ways)).parts
        layer = next(part for key, part in parts.items() if not isinstance(key, str))
        sums.append(sum(one.bytes for one in made(layer.forward)))
    assert sums[0] == 4 * sums[1]


def test_codes_save_the_memory_of_their_matrices_and_cost_time():
    floats, codes = workload(None), workload(NF4)
    held, whole = (step_work(run).updates[0].parameters for run in (codes, floats))
    nbytes = sum(code.nbytes for spec in codes.architecture.layers for code in spec.codes)
    matrices = sum(code.out_features * code.in_features for spec in codes.architecture.layers for code in spec.codes)
    assert held.codes == nbytes
    assert whole.frozen - held.frozen == matrices
    assert stage_bytes(floats)[0] - stage_bytes(codes)[0] == 2 * matrices - nbytes
    device = read_device(DEFAULT)
    passes = [step_time(run, device).seconds - device.step_overhead.value for run in (codes, floats)]
    assert passes[0] > 1.1 * passes[1]
