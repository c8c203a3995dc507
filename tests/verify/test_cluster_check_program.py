"""cluster_check --program: all ranks of somebody's program in lock-step, right ones and ones with a fault."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from kept_programs_here import unpacked

import mindllm
from mindllm.cli.check import main
from mindllm.compiled.execute.rank_interpreter import RankInterpreter
from mindllm.compiled.graph.compiled_graph import CONSTANT, Node, OtherType, TupleType
from mindllm.errors import CheckFailed, RunFailed, UserError
from mindllm.programs import lockstep as execution
from mindllm.programs.kept import kept_ranks
from mindllm.programs.verify import check_program, relative_error, with_initial_values


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    directory = tmp_path_factory.mktemp("kept")
    return {name: unpacked(f"mlp_{name}", directory) for name in ("cluster", "single")}


def test_all_ranks_compute_what_a_single_device_does(kept, capsys):
    assert main(["--program", str(kept["cluster"]), "--single", str(kept["single"]), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == mindllm.verify_program(kept["cluster"], single=kept["single"]).to_dict()
    assert (found["schema"], found["ok"], found["ranks"], found["stages"], found["compared"]) == (1, True, 4, 1, True)
    assert found["exchanges"] == 36
    assert set(found["errors"]) == {"returned", "parameters"}
    assert 0 < found["errors"]["parameters"] < 1e-5


def test_without_a_single_device_the_verdict_says_what_it_does_not_say(kept, capsys):
    assert main(["--program", str(kept["cluster"])]) == 0
    text = capsys.readouterr().out
    assert "replicas are equal and all values are finite. No comparison with one device; use --single DIR" in text


def faulty(monkeypatch, rank, change):
    """Has one rank compute gradients otherwise."""
    made = RankInterpreter.__init__

    def init(self, graph, *arguments, **named):
        made(self, graph, *arguments, **named)
        if graph.rank == rank:
            self.fault = lambda node, value: change(value) if node.op == "MatMul" and node.backward else value

    monkeypatch.setattr(RankInterpreter, "__init__", init)


def test_a_replica_that_goes_its_own_way_is_found(kept, monkeypatch, capsys):
    made = execution.ProgramCluster.step

    def step(self, number):
        outputs = made(self, number)
        held = self.machines[2].parameters["layers.1.second"]
        held.value = held.value * np.float32(1.001)
        return outputs

    monkeypatch.setattr(execution.ProgramCluster, "step", step)
    assert main(["--program", str(kept["cluster"])]) == CheckFailed.exit_code
    said = capsys.readouterr().out
    assert "step 1: layers.1.second differs between ranks 0 and 2, which have the same part of it" in said


def test_a_gradient_that_is_wrong_on_one_rank_differs_from_the_single_device(kept, monkeypatch, capsys):
    faulty(monkeypatch, 3, lambda value: value * np.float32(1.5))
    arguments = ["--program", str(kept["cluster"]), "--single", str(kept["single"])]
    assert main(arguments) == CheckFailed.exit_code
    assert "of the single device's largest element" in capsys.readouterr().out


def test_what_is_not_finite_is_found(kept, monkeypatch, capsys):
    faulty(monkeypatch, 1, lambda value: value * np.float32(np.inf))
    assert main(["--program", str(kept["cluster"]), "--steps", "1"]) == CheckFailed.exit_code
    assert "is not finite" in capsys.readouterr().out


def test_a_single_device_begins_with_what_ranks_are_known_to_begin_with(kept):
    """MindSpore fills its parameters when they are made, and what they began with is not kept: a norm's ones are lost."""
    (alone,) = (execution.read_rank(rank) for rank in kept_ranks(kept["single"]))
    ranks = [execution.read_rank(rank) for rank in kept_ranks(kept["cluster"])]
    known = [replace(rank, initial={**rank.initial, "layers.0.first": 1.0, "own": 2.0}) for rank in ranks]
    (begun,) = with_initial_values([replace(alone, initial={"own": 3.0})], known)
    assert (begun.initial["layers.0.first"], begun.initial["own"]) == (1.0, 3.0)
    assert check_program(kept["cluster"], kept["single"], 1).ok
    one = execution.ProgramCluster([begun], 1).machines[0].values()["layers.0.first"]
    assert (one == 1.0).all()


def test_what_the_single_device_has_as_well_is_no_problem_of_the_ranks(kept, monkeypatch, capsys):
    """MindFormers' dense network divides zero by zero for a counter of experts."""
    step = execution.ProgramCluster.step

    def spoiled(self, number):
        outputs = step(self, number)
        for machine in self.machines:
            held = machine.parameters["layers.1.second"]
            held.value = np.full_like(held.value, np.nan)
        return outputs

    monkeypatch.setattr(execution.ProgramCluster, "step", spoiled)
    assert main(["--program", str(kept["cluster"]), "--single", str(kept["single"]), "--steps", "1"]) == 0
    assert "not finite on the single device either: layers.1.second" in capsys.readouterr().out
    assert main(["--program", str(kept["cluster"]), "--steps", "1"]) == CheckFailed.exit_code


def test_a_number_that_only_one_side_has_is_an_infiniterelative_error():
    ones, gap = np.ones(2, np.float32), np.array([1.0, np.nan], np.float32)
    assert relative_error(ones, gap) == relative_error(gap, ones) == np.inf
    assert relative_error(gap, 2 * gap) == 0.5


def test_operators_without_a_kernel_are_named_with_their_number(kept, monkeypatch):
    monkeypatch.setattr(execution, "WITH_KERNEL", execution.WITH_KERNEL - {"ReLU", "Square"})
    monkeypatch.setattr(execution, "_has_cpu_kernel", lambda graph, node: False)
    message = r"no CPU kernel for .*ReLU \(8\).*, .*Square \(4\)"
    with pytest.raises(RunFailed, match=message):
        main(["--program", str(kept["cluster"])])


def test_ranks_that_were_not_kept(kept, tmp_path):
    shutil.copytree(kept["cluster"], tmp_path / "part")
    shutil.rmtree(tmp_path / "part" / "rank_3")
    with pytest.raises(UserError, match="no rank 3; run mindllm offline"):
        main(["--program", str(tmp_path / "part")])
    shutil.rmtree(tmp_path / "part" / "rank_1")
    with pytest.raises(UserError, match="no rank 1, 3; run mindllm offline"):
        main(["--program", str(tmp_path / "part")])
    (tmp_path / "part" / "rank_0" / "training.mindir").unlink()
    shutil.rmtree(tmp_path / "part" / "rank_2")
    with pytest.raises(UserError, match=r"contains no executable graph \(training\.mindir and parameters\.json"):
        main(["--program", str(tmp_path / "part")])


def test_options_that_do_not_go_together(kept):
    with pytest.raises(UserError, match="--single requires --program"):
        main(["--config", "run.yaml", "--single", str(kept["single"])])
    with pytest.raises(UserError, match="--program has no keys of a run"):
        main(["--program", str(kept["cluster"]), "--parallel_config.data_parallel=2"])
    with pytest.raises(UserError, match="contains 4 ranks; pass the directory of the program on one device"):
        main(["--program", str(kept["cluster"]), "--single", str(kept["cluster"])])


def test_a_graph_that_reads_its_batch_itself_is_given_it(kept):
    rank = execution.read_rank(kept_ranks(kept["single"])[0])
    (column,) = (item.type for item in rank.graph.step.inputs)
    step = rank.graph.step
    reads = Node("GetNext", "batch", (), TupleType((column,)), "Default/GetNext-op0", {})
    first = Node(CONSTANT, "first", (), OtherType("INT64"), "", {}, value=0)
    taken = Node("TupleGetItem", step.inputs[0].name, ("batch", first.name), column, "Default/TupleGetItem-op0", {})
    sunk = replace(step, nodes=(first, reads, taken, *step.nodes), inputs=())
    graph = replace(rank.graph, functions=(sunk, *rank.graph.functions[1:]))
    outputs = [execution.ProgramCluster([replace(rank, graph=one)], 1).step(1)[0] for one in (rank.graph, graph)]
    assert outputs[0] == outputs[1]


@pytest.fixture(scope="module")
def faulty_programs(tmp_path_factory):
    """Programs with a fault, kept as ``mindllm offline`` keeps them: on one device beside their ranks."""
    directory = tmp_path_factory.mktemp("faulty")
    for name in ("loss_over_devices", "sums_of_gradients"):
        unpacked(name, directory)
        unpacked(f"{name}_single", directory).rename(directory / name / "single")
    return directory


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("loss_over_devices", "Divs on rank 0 at Default/network-WithLossCell/_loss_fn-Loss/Divs-op0"),
        ("sums_of_gradients", "AllReduce on rank 0 at Default/grad_reducer-DistributedGradReducer/AllReduce-op0"),
    ],
)
def test_a_fault_that_grows_with_the_devices_is_found_and_located(faulty_programs, capsys, name, place):
    """A loss divided by the number of devices, which its mean does not need; gradients that are added and not averaged."""
    assert main(["--program", str(faulty_programs / name)]) == CheckFailed.exit_code
    assert f"first difference: {place}\n" in capsys.readouterr().out


def test_why_there_is_no_single_device_is_said(kept, tmp_path, capsys):
    shutil.copytree(kept["cluster"], tmp_path / "kept")
    (tmp_path / "kept" / "single").mkdir()
    (tmp_path / "kept" / "single" / "why_not.txt").write_text("rank 0: the program failed with ValueError: 4 devices")
    assert main(["--program", str(tmp_path / "kept")]) == 0
    said = capsys.readouterr().out
    assert "No comparison with one device: rank 0: the program failed with ValueError: 4 devices" in said


def test_ranks_that_average_over_their_own_rows_return_means_of_what_one_device_does(faulty_programs):
    found = check_program(faulty_programs / "sums_of_gradients", None, 1)
    assert found.errors["returned"] < 1e-6
    assert found.errors["parameters"] > 1e-3
