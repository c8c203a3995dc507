"""Small programs as people write them, one for each way to train: optimizers, loss scales, pipelines, interfaces of MindSpore.

Each is the text of a whole program over ``get_group_size()`` devices; nothing in them knows of mindllm.
"""

import sys
import textwrap

HEAD = """
    import numpy as np
    import mindspore as ms
    from mindspore import nn, ops
    from mindspore.communication import get_group_size, init

    ms.set_context(mode=ms.GRAPH_MODE, device_target="Ascend", max_device_memory="2GB", jit_config={"jit_level": "O0"})
    init()
    devices = get_group_size()

    class Net(nn.Cell):
        def __init__(self, cut=((1, 1), (1, 1)), cut_second=((1, 1), (1, 1))):
            super().__init__()
            self.first = ms.Parameter(ms.Tensor(np.full((16, 32), 0.01, np.float32)), name="first")
            self.second = ms.Parameter(ms.Tensor(np.full((32, 8), 0.01, np.float32)), name="second")
            self.widen = ops.MatMul().shard(cut)
            self.relu = ops.ReLU()
            self.narrow = ops.MatMul().shard(cut_second)

        def construct(self, x):
            return self.narrow(self.relu(self.widen(x, self.first)), self.second)

    def dataset(rows):
        x = np.random.default_rng(0).standard_normal((3 * rows, 16)).astype(np.float32)
        y = np.random.default_rng(1).integers(0, 8, 3 * rows).astype(np.int32)
        return ms.dataset.NumpySlicesDataset({"x": x, "y": y}, shuffle=False).batch(rows)

    def loss_of(net):
        return nn.WithLossCell(net, nn.CrossEntropyLoss())
"""
TENSOR = """
    ms.set_auto_parallel_context(parallel_mode="semi_auto_parallel", device_num=devices, full_batch=True)
    net = Net(((devices // 2, 1), (1, 2)), ((devices // 2, 2), (2, 1))) if devices > 1 else Net()
    loss = nn.CrossEntropyLoss()
"""
OPTIMIZERS = {
    "sgd": "nn.SGD(net.trainable_params(), 0.1)",
    "sgd with momentum": "nn.SGD(net.trainable_params(), 0.1, momentum=0.9, dampening=0.1, weight_decay=0.01)",
    "nesterov": "nn.SGD(net.trainable_params(), 0.1, momentum=0.9, nesterov=True)",
    "momentum": "nn.Momentum(net.trainable_params(), 0.1, 0.9, use_nesterov=True)",
    "adam": "nn.Adam(net.trainable_params(), 0.01)",
    "adam weight decay": "nn.AdamWeightDecay(net.trainable_params(), 0.01, weight_decay=0.1)",
    "lamb": "nn.Lamb(net.trainable_params(), 0.01)",
    "adafactor": "nn.AdaFactor(net.trainable_params(), 0.01, scale_parameter=False, relative_step=False)",
    "rmsprop": "nn.RMSProp(net.trainable_params(), 0.01)",
    "adagrad": "nn.Adagrad(net.trainable_params(), 0.01)",
}
BY_OPTIMIZER = (
    TENSOR
    + """
    model = ms.Model(net, loss, OPTIMIZER)
    model.train(1, dataset(8), dataset_sink_mode=False)
"""
)
PROGRAMS = {
    "Model.train, sinking": TENSOR + """
    model = ms.Model(net, loss, nn.Momentum(net.trainable_params(), 0.1, 0.9))
    model.train(1, dataset(8), dataset_sink_mode=True)
""",
    "Model.fit": TENSOR + """
    model = ms.Model(net, loss, nn.Momentum(net.trainable_params(), 0.1, 0.9), metrics={"loss": nn.Loss()})
    model.fit(2, dataset(8), dataset(8), dataset_sink_mode=False)
""",
    "data parallel": """
    ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)
    net = Net()
    loss = nn.CrossEntropyLoss()
    model = ms.Model(net, loss, nn.SGD(net.trainable_params(), 0.1))
    model.train(1, dataset(8), dataset_sink_mode=True)
""",
    "loss scale": """
    ms.set_auto_parallel_context(parallel_mode="semi_auto_parallel", device_num=devices, dataset_strategy="data_parallel")
    net = Net()
    manager = nn.DynamicLossScaleUpdateCell(2**12, 2, 1000)
    step = nn.TrainOneStepWithLossScaleCell(loss_of(net), nn.Momentum(net.trainable_params(), 0.1, 0.9), manager)
    step.set_train()
    for x, y in dataset(8):
        step(x, y)
""",
    "fixed loss scale": TENSOR + """
    manager = ms.FixedLossScaleManager(1024.0, drop_overflow_update=False)
    optimizer = nn.Adam(net.trainable_params(), 0.01, loss_scale=1024.0)
    model = ms.Model(net, loss, optimizer, loss_scale_manager=manager, amp_level="O2")
    model.train(1, dataset(8), dataset_sink_mode=False)
""",
    "optimizer parallel": """
    ms.set_auto_parallel_context(
        parallel_mode="semi_auto_parallel", device_num=devices, dataset_strategy="data_parallel", enable_parallel_optimizer=True,
        parallel_optimizer_config={"parallel_optimizer_threshold": 0})
    net = Net(((devices, 1), (1, 1)), ((devices, 1), (1, 1)))
    step = nn.TrainOneStepCell(loss_of(net), nn.AdamWeightDecay(net.trainable_params(), 0.01))
    step.set_train()
    for x, y in dataset(8):
        step(x, y)
""",
    "PipelineCell": """
    ms.set_auto_parallel_context(
        parallel_mode="semi_auto_parallel", device_num=devices, full_batch=True, pipeline_stages=min(2, devices))

    class Two(nn.Cell):
        def __init__(self):
            super().__init__()
            self.front = nn.Dense(16, 32)
            self.front.pipeline_stage = 0
            self.back = nn.Dense(32, 8)
            self.back.pipeline_stage = 1 if devices > 1 else 0

        def construct(self, x):
            return self.back(self.front(x))

    net = Two()
    cell = nn.PipelineCell(loss_of(net), 2)
    model = ms.Model(cell, optimizer=nn.SGD(net.trainable_params(), 0.1))
    model.train(1, dataset(8), dataset_sink_mode=False)
""",
    "PipelineGradReducer": """
    ms.set_auto_parallel_context(parallel_mode="semi_auto_parallel", pipeline_stages=min(2, devices))

    class Printed(nn.Cell):
        def __init__(self):
            super().__init__()
            self.weight = ms.Parameter(ms.Tensor(np.full((16, 32), 0.01, np.float32)), name="weight")
            self.matmul, self.print = ops.MatMul(), ops.Print()

        def construct(self, x):
            out = self.matmul(x, self.weight)
            self.print("out", out)
            return out

    class Three(nn.Cell):
        def __init__(self):
            super().__init__()
            self.front, self.middle, self.back = Printed(), nn.Dense(32, 32), nn.Dense(32, 8)
            self.first_relu, self.second_relu = nn.ReLU(), nn.ReLU()

        def construct(self, x):
            return self.back(self.second_relu(self.middle(self.first_relu(self.front(x)))))

    net = Three()
    for cell in (net.front, net.first_relu, net.middle):
        cell.pipeline_stage = 0
    for cell in (net.second_relu, net.back):
        cell.pipeline_stage = 1 if devices > 1 else 0
    optimizer = nn.SGD(net.trainable_params(), 0.1)
    whole = nn.PipelineCell(loss_of(net), 4)
    whole.set_train()

    def forward(x, y):
        loss = whole(x, y)
        return loss

    gradient = ops.value_and_grad(forward, None, optimizer.parameters)
    reducer = nn.PipelineGradReducer(optimizer.parameters)

    @ms.jit
    def step(x, y):
        loss, gradients = gradient(x, y)
        gradients = reducer(gradients)
        optimizer(gradients)
        return loss, gradients

    for x, y in dataset(8):
        step(x, y)
""",
    "GradAccumulation": """
    from mindspore.parallel.auto_parallel import AutoParallel
    from mindspore.parallel.nn import GradAccumulation

    net = Net(((devices // 2, 1), (1, 2)), ((devices // 2, 2), (2, 1))) if devices > 1 else Net()
    cell = AutoParallel(GradAccumulation(loss_of(net), 2), parallel_mode="semi_auto")
    cell.dataset_strategy("full_batch")
    model = ms.Model(cell, optimizer=nn.SGD(net.trainable_params(), 0.1))
    model.train(1, dataset(8), dataset_sink_mode=True)
""",
    "Pipeline and AutoParallel": """
    from mindspore.parallel.auto_parallel import AutoParallel
    from mindspore.parallel.nn import Pipeline

    class Two(nn.Cell):
        def __init__(self):
            super().__init__()
            self.front = nn.Dense(16, 32)
            self.relu = nn.ReLU()
            self.back = nn.Dense(32, 8)

        def construct(self, x):
            return self.back(self.relu(self.front(x)))

    net = Two()
    stages = {"_backbone.front": 0, "_backbone.relu": 0, "_backbone.back": 1}
    cell = AutoParallel(Pipeline(loss_of(net), 2, stage_config=stages), parallel_mode="semi_auto")
    cell.pipeline(stages=2)
    cell.dataset_strategy("data_parallel")
    model = ms.Model(cell, optimizer=nn.SGD(net.trainable_params(), 0.1))
    model.train(1, dataset(8))
""",
    "jit function": """
    from mindspore.parallel.auto_parallel import AutoParallel

    net = Net(((devices // 2, 1), (1, 2)), ((devices // 2, 2), (2, 1))) if devices > 1 else Net()
    optimizer = nn.SGD(net.trainable_params(), 0.1)
    loss = nn.CrossEntropyLoss()

    def forward(x, y):
        return loss(net(x), y)

    gradient = ms.value_and_grad(forward, None, net.trainable_params())

    @ms.jit
    def step(x, y):
        value, gradients = gradient(x, y)
        optimizer(gradients)
        return value

    class Step(nn.Cell):
        def construct(self, x, y):
            return step(x, y)

    ms.set_auto_parallel_context(parallel_mode="semi_auto_parallel", device_num=devices, full_batch=True)
    for x, y in dataset(8):
        step(x, y)
""",
    "AutoParallel of a step": """
    from mindspore.parallel.auto_parallel import AutoParallel

    net = Net(((devices // 2, 1), (1, 2)), ((devices // 2, 2), (2, 1))) if devices > 1 else Net()
    step = nn.TrainOneStepCell(loss_of(net), nn.SGD(net.trainable_params(), 0.1))
    step.set_train()
    cell = AutoParallel(step, parallel_mode="semi_auto")
    cell.dataset_strategy("full_batch")
    cell.hsdp(threshold=0)
    for x, y in dataset(8):
        cell(x, y)
""",
    "sharding propagation": """
    ms.set_auto_parallel_context(
        parallel_mode="auto_parallel", search_mode="sharding_propagation", device_num=devices, full_batch=True)
    net = Net(((devices // 2, 1), (1, 2)), ((devices // 2, 2), (2, 1))) if devices > 1 else Net()
    step = nn.TrainOneStepCell(loss_of(net), nn.Momentum(net.trainable_params(), 0.1, 0.9))
    step.set_train()
    for x, y in dataset(8):
        step(x, y)
""",
    "recursive programming": """
    from mindspore.parallel.auto_parallel import AutoParallel

    net = Net()
    step = nn.TrainOneStepCell(loss_of(net), nn.Momentum(net.trainable_params(), 0.1, 0.9))
    step.set_train()
    cell = AutoParallel(step, parallel_mode="recursive_programming")
    for x, y in dataset(8):
        cell(x, y)
""",
}  # fmt: skip

FAULTS = {
    "loss over the devices": """
    ms.set_auto_parallel_context(parallel_mode="semi_auto_parallel", device_num=devices, full_batch=True)

    class Loss(nn.Cell):
        def __init__(self):
            super().__init__()
            self.loss = nn.CrossEntropyLoss()

        def construct(self, logits, labels):
            return self.loss(logits, labels) / devices

    net = Net(((devices // 2, 1), (1, 2)), ((devices // 2, 2), (2, 1))) if devices > 1 else Net()
    model = ms.Model(net, Loss(), nn.Momentum(net.trainable_params(), 0.1, 0.9))
    model.train(1, dataset(8), dataset_sink_mode=False)
""",
    "loss beside something else": """
    ms.set_auto_parallel_context(parallel_mode="semi_auto_parallel", device_num=devices)
    net = Net(((devices, 1), (1, 1)), ((devices, 1), (1, 1)))
    optimizer = nn.SGD(net.trainable_params(), 0.1)
    loss = nn.CrossEntropyLoss()

    def forward(x, y):
        logits = net(x)
        return loss(logits, y), logits

    gradient = ms.value_and_grad(forward, None, net.trainable_params(), has_aux=True)

    @ms.jit
    def step(x, y):
        (value, _), gradients = gradient(x, y)
        optimizer(gradients)
        return value

    for x, y in dataset(8):
        step(x, y)
""",
    "gradients not averaged": """
    ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=False)
    net = Net()
    model = ms.Model(net, nn.CrossEntropyLoss(), nn.SGD(net.trainable_params(), 0.1))
    model.train(1, dataset(8), dataset_sink_mode=False)
""",
}


def write(path, body):
    """Writes a program; returns its command."""
    path.write_text(textwrap.dedent(HEAD) + textwrap.dedent(body), encoding="utf-8")
    return [sys.executable, str(path)]
