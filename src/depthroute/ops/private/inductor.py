"""What Inductor may be told about these ops.

A boundary's y is read by every projection of its sublayer, so two or three gradients of it come
back. Inductor adds them in a kernel of its own, which writes a sum only for the boundary's backward
to read. With :func:`compile_options` that kernel reads them itself: two passes a site less.

    model = torch.compile(model, options=depthroute.ops.compile_options())
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.fx import Graph, Node

IS_KNOWN = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 14)
"""Whether this torch keeps beside a node's arguments what :func:`_replace` knows of."""
MOST_TERMS = 4
"""Of one gradient that a kernel adds up; each has rows on their way to every program."""


def compile_options() -> dict[str, Any]:
    """``options`` for ``torch.compile`` with Inductor: graphs that need a pass less here and there.

    Empty where a pass has been put in that place already, and with a torch that is not known here.
    The values are the same but for the rounding of a sum. ``torch.compile`` takes no ``mode``
    beside options; ``torch._inductor.list_mode_options`` says what a mode stands for.
    """
    from torch._inductor import config

    place = "post_grad_custom_pre_pass"
    is_free = IS_KNOWN and getattr(config, place, None) is None
    return {place: _terms_pass()} if is_free else {}


@cache
def _terms_pass() -> Any:
    """Made late, since importing Inductor takes a second."""
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    class PassesTerms(CustomGraphPass):
        def __call__(self, graph: Graph) -> None:
            pass_terms(graph)

        def uuid(self) -> Any:
            return get_hash_for_files((__file__,))

    return PassesTerms()


def pass_terms(graph: Graph) -> None:
    """Hands a boundary's backward the terms of the gradient of y in place of their sum."""
    backward = torch.ops.depthroute.depth_mix_triton_backward.default
    for node in graph.find_nodes(op="call_function", target=backward):
        totals = list(node.args[1])
        terms = [term for total in totals for term in _terms(total)]
        if len(totals) < len(terms) <= MOST_TERMS:
            _replace(node, terms)
            for total in totals:
                _erase(total)


def _replace(node: Node, terms: list[Node]) -> None:
    """Also what Inductor takes strides from, which it would otherwise cut the arguments to."""
    grad, _, *rest = node.args
    node.args = grad, terms, *rest
    if "eager_input_vals" in node.meta:
        (grad, _, *rest), named = node.meta["eager_input_vals"]
        values = [term.meta["val"] for term in terms]
        node.meta["eager_input_vals"] = (grad, values, *rest), named


def _terms(node: Node) -> list[Node]:
    """What ``node`` is the sum of, if nobody else needs a sum on the way."""
    is_sum = node.target is torch.ops.aten.add.Tensor and not node.kwargs and len(node.users) == 1
    if not is_sum or not all(_is_alike(arg, node) for arg in node.args):
        return [node]
    return [term for arg in node.args for term in _terms(arg)]  # pyright: ignore[reportArgumentType]


def _is_alike(arg: Any, node: Node) -> bool:
    """Whether both are tensors of one shape and dtype, as far as that is known without guards."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    if not isinstance(arg, Node):
        return False
    mine, other = arg.meta.get("val"), node.meta.get("val")
    if not isinstance(mine, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    if mine.dtype != other.dtype or mine.dim() != other.dim():
        return False
    return all(statically_known_true(a == b) for a, b in zip(mine.shape, other.shape, strict=True))


def _erase(node: Node) -> None:
    """A sum without users, and those on the way to it."""
    if node.users or node.target is not torch.ops.aten.add.Tensor:
        return
    inputs = node.all_input_nodes
    node.graph.erase_node(node)
    for one in inputs:
        _erase(one)
