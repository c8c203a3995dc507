"""The order in which MindSpore's back end runs the operators of a graph, worked out from the graph.

It is that of ``ExecOrderBuilder`` (mindspore/ccsrc/backend/common/kernel_graph/exec_order_builder.cc, known from its published
source): breadth first, with two exceptions. An operator that waits for nothing, such as the cast of a weight, is held back
until the operators around its first use run; what follows an exchange with other ranks runs when nothing else can.
In a branch nothing waits for nothing: all its inputs come out of the switch in front of it.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque

from mindllm.compiled.graph.compiled_graph import COLLECTIVES, CONSTANT, Function, Node

VIRTUAL = frozenset({"Depend", "Load", "UpdateState", "MakeTuple", "TupleGetItem", "Partial"})
"""Nodes that launch nothing."""
RETURN, ENTRY = "return", "entry"
BRANCHES = ("then", "else")


def execution_order(function: Function) -> list[Node]:
    """The nodes of ``function`` that its output needs, in the order they run; virtual ones where they become known."""
    return _Order(function).build()


class _Order:
    """The edges of a function and what is left of them while nodes are lined up."""

    def __init__(self, function: Function) -> None:
        self.function = function
        self.nodes = {node.name: node for node in function.nodes if node.op != CONSTANT}
        self.inputs = {item.name for item in function.inputs} if function.role in BRANCHES else set()
        self.trivial = self._trivial()
        self.users: defaultdict[str, list[str]] = defaultdict(list)
        self.waiting: Counter[str] = Counter()
        self._link()
        self.independent: list[str] = []
        self._hold_back_independent()

    def build(self) -> list[Node]:
        """Lines the nodes up; those that depend on nothing that runs come first."""
        order = [self.nodes[name] for name in self.nodes if name in self.trivial]
        delayed: deque[str] = deque()
        pending: str | None = None
        queue: deque[str] = deque()
        urgent: deque[str] = deque()
        while self.independent or pending or delayed:
            if delayed:
                self._release(delayed.popleft(), urgent, exchanges_first=False)
            elif pending:
                self._release(pending, urgent, exchanges_first=False)
                pending = None
            else:
                queue.append(self.independent.pop())
            while urgent or queue:
                here = urgent if urgent else queue
                name = here.popleft()
                node = self.nodes.get(name)
                if node is None:
                    if name != RETURN:
                        self._release(name, here, exchanges_first=True)
                    continue
                order.append(node)
                if _fused(node):
                    if pending:
                        self._release(pending, urgent, exchanges_first=False)
                    pending = name
                elif node.op in COLLECTIVES:
                    delayed.append(name)
                else:
                    self._release(name, here, exchanges_first=True)
        return order

    def _needs(self, name: str) -> list[str]:
        """Nodes whose values a node takes, in the order of its inputs; nodes of the function only."""
        if name in self.inputs:
            return [ENTRY]
        if name == ENTRY:
            return []
        given: tuple[str, ...] = (self.function.output,)
        if name != RETURN:
            node = self.nodes[name]
            given = (node.callee, *node.inputs) if node.callee else node.inputs
        return [source for source in given if source in self.nodes or source in self.inputs]

    def _virtual(self, name: str) -> bool:
        """Whether nothing is launched for a name."""
        return name != ENTRY and (name not in self.nodes or self.nodes[name].op in VIRTUAL)

    def _trivial(self) -> set[str]:
        """Virtual nodes behind which nothing runs. ``nodes`` are in topological order."""
        found: set[str] = set()
        for name, node in self.nodes.items():
            if node.op in VIRTUAL and all(source in found for source in self._needs(name)):
                found.add(name)
        return found

    def _link(self) -> None:
        """Edges between nodes that are not trivial, found breadth first from the output."""
        queue, seen = deque([RETURN]), {RETURN}
        while queue:
            name = queue.popleft()
            for source in self._needs(name):
                if source in self.trivial:
                    continue
                self.users[source].append(name)
                self.waiting[name] += 1
                if source not in seen:
                    seen.add(source)
                    queue.append(source)

    def _hold_back_independent(self) -> None:
        """Collects nodes that wait for nothing; walking back, each is tied to the next node that runs."""
        uses = Counter({name: len(users) for name, users in self.users.items()})
        virtual, real = deque([RETURN]), deque[str]()
        while virtual or real:
            name = virtual.popleft() if virtual else real.popleft()
            independent = True
            for source in reversed(self._needs(name)):
                if source in self.trivial:
                    continue
                independent = False
                uses[source] -= 1
                if uses[source]:
                    continue
                if self._virtual(source):
                    virtual.append(source)
                    continue
                real.append(source)
                if self.independent:
                    held = self.independent.pop()
                    self.users[source].append(held)
                    self.waiting[held] += 1
            if independent and name != RETURN:
                self.independent.append(name)

    def _release(self, name: str, queue: deque[str], exchanges_first: bool) -> None:
        """Queues the users of a node that wait for nothing else."""
        users, later = self.users[name], []
        for user in users:
            if self.waiting[user] == 0:
                continue
            self.waiting[user] -= 1
            if self.waiting[user]:
                continue
            if self._virtual(user) or len(users) == 1:
                queue.appendleft(user)
            elif (self.nodes[user].op in COLLECTIVES) == exchanges_first:
                queue.append(user)
            else:
                later.append(user)
        queue.extend(later)


def _fused(node: Node) -> bool:
    """Whether it is an exchange that may be merged with others: a gradient's, or the gathering of a weight."""
    return node.op in COLLECTIVES and bool(node.attributes.get("fusion"))
