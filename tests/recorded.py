"""CUDA graphs without CUDA: what a graph does to a step, on the CPU.

Inside ``torch.cuda.graph`` every operator is written down with the tensors it was given and made,
and a replay runs all of them again on that memory. Python beside the operators is left out of it,
as it is of a graph; unlike there, the operators are also run while they are written down, so what
they have changed is put back.
"""

from contextlib import contextmanager, nullcontext
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from depthroute.train import graphs
from depthroute.train.graphs import StepGraphs


class Graph:
    def __init__(self):
        self.calls, self.replays = [], 0

    def pool(self):
        return "a pool"

    def replay(self):
        self.replays += 1
        with torch.no_grad():
            for function, args, kwargs, made in self.calls:
                again = tensors(function(*args, **kwargs))
                for place, value in zip(made, again, strict=True):
                    if place.data_ptr() != value.data_ptr():
                        place.copy_(value)


class Recording(TorchDispatchMode):
    def __init__(self, graph):
        super().__init__()
        self.graph, self.before = graph, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("reads something back, which no graph can")
        kwargs, is_changing = kwargs or {}, function._schema.is_mutable
        given = tensors((args, kwargs)) if is_changing else []
        self.before += [(x, x.detach().clone()) for x in given]
        result = function(*args, **kwargs)
        self.graph.calls.append((function, args, kwargs, tensors(result)))
        return result

    def put_back(self):
        with torch.no_grad():
            for tensor, value in reversed(self.before):
                tensor.copy_(value)


class Event:
    def record(self, stream=None):
        pass

    synchronize = record


def tensors(tree):
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]


@contextmanager
def graph(into, pool=None):
    recording = Recording(into)
    told = mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True)
    with told, recording:
        yield
    recording.put_back()


def use(monkeypatch):
    """For the rest of a test."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "a pool")
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(graphs, "_pinned", lambda tensor: tensor)
    monkeypatch.setattr(graphs, "_watched", lambda: nullcontext([]))


def replaying(trainer):
    """``trainer`` with the graphs that it would have on a CUDA device."""
    trainer.graphs = StepGraphs(trainer._part_gradients, trainer._judged, trainer.inner)
    return trainer
