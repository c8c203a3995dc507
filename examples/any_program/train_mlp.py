"""A MindSpore program that knows nothing of mindllm: blocks of two matrices, over devices and stages as asked for.

mindllm offline --devices 4 --ranks all --keep output_cluster -- python train_mlp.py
mindllm offline --keep output_single -- python train_mlp.py --data_parallel 1 --model_parallel 1
mindllm offline --devices 8 -- python train_mlp.py --split 3,1 --recompute 2,0
"""

import argparse

import mindspore as ms
import numpy as np
from mindspore import nn, ops
from mindspore.communication import init

parser = argparse.ArgumentParser(description="Trains blocks of two matrices on numbers.")
parser.add_argument("--data_parallel", type=int, default=2)
parser.add_argument("--model_parallel", type=int, default=2)
parser.add_argument("--split", default="2", help="blocks of each pipeline stage, as 3,1")
parser.add_argument("--recompute", default="0", help="of these, how many are recomputed")
parser.add_argument("--micro_batches", type=int, default=4, help="where there is a pipeline")
parser.add_argument("--hidden", type=int, default=64)
parser.add_argument("--rows", type=int, default=32)
options = parser.parse_args()
split, recompute = ([int(number) for number in text.split(",")] for text in (options.split, options.recompute))
recompute += [0] * (len(split) - len(recompute))
devices = options.data_parallel * options.model_parallel * len(split)

ms.set_context(mode=ms.GRAPH_MODE, device_target="Ascend", max_device_memory="2GB", jit_config={"jit_level": "O0"})
if devices > 1:
    init()
    ms.set_auto_parallel_context(
        parallel_mode="semi_auto_parallel", device_num=devices, full_batch=True, pipeline_stages=len(split)
    )


class Block(nn.Cell):
    """x + second(relu(first(x))): the first matrix is cut by columns, the second by rows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        rows, parts = options.data_parallel, options.model_parallel
        self.first = ms.Parameter(ms.Tensor(np.full((width, 4 * width), 0.01, np.float32)), name="first")
        self.second = ms.Parameter(ms.Tensor(np.full((4 * width, width), 0.01, np.float32)), name="second")
        self.widen = ops.MatMul().shard(((rows, 1), (1, parts)))
        self.relu = ops.ReLU().shard(((rows, parts),))
        self.narrow = ops.MatMul().shard(((rows, parts), (parts, 1)))
        self.add = ops.Add().shard(((rows, 1), (rows, 1)))

    def construct(self, x: ms.Tensor) -> ms.Tensor:
        """[rows, width] to the same."""
        return self.add(x, self.narrow(self.relu(self.widen(x, self.first)), self.second))


class Net(nn.Cell):
    """Blocks, and the mean of what they yield squared."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.CellList([Block(options.hidden) for _ in range(sum(split))])
        numbers = iter(self.layers)
        for stage, (count, repeated) in enumerate(zip(split, recompute, strict=True)):
            for place in range(count):
                block = next(numbers)
                block.pipeline_stage = stage
                if place < repeated:
                    block.recompute()
        self.square = ops.Square().shard(((options.data_parallel, 1),))
        self.mean = ops.ReduceMean().shard(((options.data_parallel, 1),))

    def construct(self, x: ms.Tensor) -> ms.Tensor:
        """[rows, width] to a number."""
        for layer in self.layers:
            x = layer(x)
        return self.mean(self.square(x), (0, 1))


net = Net()
if len(split) > 1:
    net = nn.PipelineCell(net, options.micro_batches)
batch = np.random.default_rng(0).standard_normal((options.rows, options.hidden)).astype(np.float32)
data = ms.dataset.NumpySlicesDataset([batch] * 3, ["x"], shuffle=False)
model = ms.Model(net, optimizer=nn.Momentum(net.trainable_params(), 0.1, 0.9))
model.train(1, data, callbacks=ms.train.LossMonitor(1), dataset_sink_mode=False)
