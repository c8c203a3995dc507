"""The memory of a stage taken apart: a step of 1F1B whose blocks are known."""

from mindllm.compiled.simulation.simulation import Block, Simulation, Task
from mindllm.compiled.simulation.stage_memory import stage_memory

KEPT, SHARED, STATE, WORKING = 100, 7, 1000, 30
LAYER = "Default/net-Net/layers-CellList/{}-Block/MatMul-op{}"
BACK = "Gradients/Default/net-Net/layers-CellList/{}-Block/MatMul-op{}"


class Step:
    """Writes tasks and blocks in the order of 1F1B for a stage of two layers."""

    def __init__(self, alive, micro_batches, last):
        self.tasks, self.blocks, self.time = [], [], 1
        self.open = {}
        self.last = last
        order = [("f", micro) for micro in range(alive)]
        for micro in range(micro_batches):
            order.append(("b", micro))
            if micro + alive < micro_batches:
                order.append(("f", micro + alive))
        self.shared_until = None
        for what, micro in order:
            (self.forward if what == "f" else self.backward)(micro)
        self.end = self.time
        self.run("Default/optimizer-Momentum/ApplyMomentum-op0")
        self.block("Default/optimizer-Momentum/Mul-op1", self.end, self.time, WORKING * 9)
        self.block("Default/Gather-op0", 2, self.end, SHARED)

    def run(self, node):
        self.tasks.append(Task(self.time, node, 0))
        self.time += 1
        return self.time - 1

    def block(self, node, start, end, size):
        self.blocks.append(Block(start, end, 0, 0, size, "Kernel", node, (), "activations"))

    def forward(self, micro):
        for layer in (4, 5):
            start = self.run(LAYER.format(layer, micro))
            self.open[micro, layer] = start
        if self.last:
            self.run(f"Default/net-Net/Loss-op{micro}")

    def backward(self, micro):
        if self.last:
            self.run(f"Gradients/Default/net-Net/LossGrad-op{micro}")
        else:
            self.run(f"Gradients/Default/Grad_Send/Receive-op{micro}")
        for layer in (5, 4):
            now = self.run(BACK.format(layer, micro))
            self.block(BACK.format(layer, micro), now, now + 1, WORKING)
            self.block(LAYER.format(layer, micro), self.open[micro, layer], now + 1, KEPT)

    def simulation(self, stage):
        weights = Block(0, None, 0, 0, STATE, "Weight", "layers.4.weight", (), "weights")
        return Simulation(0, stage, 1 << 40, 1 << 40, 0, 0, (weights, *self.blocks), tuple(self.tasks), ())


def test_a_first_stage_keeps_as_many_micro_batches_as_there_are_stages():
    memory = stage_memory(Step(3, 6, last=False).simulation(0), "layers", 6, 3)
    assert (memory.stays, memory.shared, memory.kept, memory.alive) == (STATE, SHARED, 2 * KEPT, 3)
    assert memory.passes == STATE + SHARED + 3 * 2 * KEPT + WORKING
    assert memory.ends == STATE + SHARED + 9 * WORKING - SHARED


def test_what_one_micro_batch_keeps_on_the_last_stage_is_read_off_the_second():
    memory = stage_memory(Step(1, 4, last=True).simulation(2), "layers", 4, 3)
    assert (memory.kept, memory.alive, memory.shared) == (2 * KEPT, 1, SHARED)


def test_another_list_of_cells_or_another_schedule_is_not_taken_apart():
    simulation = Step(3, 6, last=False).simulation(0)
    assert stage_memory(simulation, "blocks", 6, 3) is None
    assert stage_memory(simulation, "layers", 6, 2) is None  # three forward passes where 1F1B has two
