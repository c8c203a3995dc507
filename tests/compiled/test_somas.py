"""The plan of a graph's memory: what MindSpore writes of it, and what is there at its fullest moment."""

from mindllm.compiled.simulation.memory_tracker import fullest_moment, read_plans

UP, DOWN, BACK = (f"Default/layers-CellList/0-Layer/{name}-op0" for name in ("MatMul", "SiLU", "Grad"))
TENSORS = (  # size, offset, first and last operator of its life, what writes it
    (512, 0, 0, 3, UP),
    (1024, 512, 1, 2, DOWN),
    (768, 512, 1, 2, DOWN),  # in place of the one above
    (2048, 512, 3, 4, BACK),
)
NODES = ((UP, ""), (DOWN, "%0T, %3P, "), (BACK, "%0T, %1T, "))


def plan_text() -> str:
    """A plan in MindSpore's format."""
    tensors = (
        f"%{number}T\t#{size}S\t#{size - 100}S\t&{offset}\tCommon\tLifeLongNone\t{start}\t{end}\t{node}"
        for number, (size, offset, start, end, node) in enumerate(TENSORS)
    )
    nodes = (
        f"${number}\t{name}\t0\tinputs[{inputs}]\toutputs[%{number}T, ]\tworkspace[]"
        for number, (name, inputs) in enumerate(NODES)
    )
    return "\n".join(["All Parameters:", "%0P\t#8S\tweight\t0", "All Tensors:", *tensors, "All Nodes:", *nodes])


def test_a_plan_is_read_and_its_fullest_moment_found(tmp_path):
    (tmp_path / "Ascend_somas_tensor_offset_0.ir").write_text(plan_text(), encoding="utf-8")
    (plan,) = read_plans(tmp_path)
    assert [(t.size, t.offset, t.start, t.end, t.node) for t in plan] == list(TENSORS)
    assert [tensor.users for tensor in plan[:2]] == [(DOWN, BACK), (BACK,)]
    assert [tensor.size for tensor in fullest_moment(plan)] == [512, 2048]
    assert [tensor.size for tensor in fullest_moment(plan[:3])] == [512, 1024]
    assert fullest_moment([]) == []


def test_without_planned_memory_there_is_no_plan(tmp_path):
    assert read_plans(tmp_path) == []
