"""Cross-entropy of a head's logits that never holds all of them.

Tokens are taken a chunk at a time: their logits, the losses, and at once the gradients of the
logits, written over them. Two products turn those into what they add to the gradients of the hidden
states and of the head, and the next chunk takes the same memory. So forward does the work of
backward too, where a gradient is wanted, and keeps [tokens, width] and [vocabulary, width] numbers
for it in place of several times [tokens, vocabulary].

Logits have the precision of the product, as a head's own have; all that is made of a row is fp32,
and so is the sum of the head's gradient over chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from depthroute.errors import DepthrouteError
from depthroute.ops import reference
from depthroute.ops._torch import is_autocast
from depthroute.ops.backends import choose, ran_by_definition
from depthroute.ops.private.dispatch import FromTriton, Op
from depthroute.ops.private.transforms import no_derivative, refuse_batched

CHUNK_LOGITS = 2**29
"""Of a chunk whose size nobody chose: 1 GiB in bf16, and 3,500 tokens of 152K words, which keep
a product busy and make adding its part to the head's gradient cheap beside it."""
MULTIPLE = 64
"""Of which the rows of a chunk, and the numbers from row to row, are one: products and kernels like
neither a vocabulary of 50,257 nor a row that starts anywhere."""


class HeadLoss(NamedTuple):
    hidden: Tensor
    """[N, D], in the dtype of the products."""
    weight: Tensor
    """[V, D]; its gradient has this dtype."""
    bias: Tensor | None
    targets: Tensor
    scale: float
    softcap: float
    """0 is none."""
    ignore_index: int
    chunk: int
    """Tokens of one; 0 leaves it to the backend."""
    wants: list[bool]
    """Gradients, of hidden, weight and bias."""

    @property
    def wanted(self) -> list[Tensor]:
        """Those that a gradient of is wanted."""
        named = zip((self.hidden, self.weight, self.bias), self.wants, strict=True)
        return [t for t, is_wanted in named if is_wanted and t is not None]


HeadLossResults = tuple[Tensor, list[Tensor]]
"""The sum, and the gradients that are wanted."""
RowLosses = Callable[[Tensor, Tensor, HeadLoss], Tensor]
"""Of logits [n, V] and targets; the gradients of the logits, if any is wanted, in their place."""


def _fake(*arguments) -> HeadLossResults:
    given = HeadLoss(*arguments)
    gradients = [torch.empty_like(t) for t in given.wanted]
    return given.hidden.new_empty((), dtype=_wide(given)), gradients


def _torch_forward(given: HeadLoss) -> HeadLossResults:
    return by_chunks(given, _row_losses)


FORWARD = {
    "torch": Op("linear_cross_entropy", HeadLoss, HeadLossResults, _fake, _torch_forward),
    "triton": Op(
        "linear_cross_entropy_triton",
        HeadLoss,
        HeadLossResults,
        _fake,
        FromTriton("cross_entropy", "head_loss"),
    ),
}


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    backend: str = "auto",
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    chunk: int | None = None,
) -> Tensor:
    """``sum log sum_v exp(z_v) - z_target`` over tokens, with z = scale (hidden W^T + bias).

    ``hidden`` is ``[..., D]``, ``weight`` ``[V, D]`` and ``targets`` ``[...]``; ``softcap`` c makes
    z ``c tanh(z / c)``. The logits of ``chunk`` tokens exist at a time. Under autocast the products
    have its dtype and the gradient of an fp32 weight is summed up in fp32. See
    :func:`depthroute.ops.reference.linear_cross_entropy` for the definition.

    >>> hidden, weight = torch.zeros(2, 3, 8), torch.zeros(16, 8)
    >>> loss = linear_cross_entropy(hidden, weight, torch.ones(2, 3, dtype=torch.int64))
    >>> round(loss.exp().item() ** (1 / 6))
    16
    """
    _check(hidden, weight, targets, bias, softcap, chunk)
    device = hidden.device.type
    chosen = choose("linear_cross_entropy", device, backend, _product_dtype(hidden)).backend
    if chosen == "reference":
        ran_by_definition("linear_cross_entropy")
        options = {"scale": scale, "softcap": softcap, "ignore_index": ignore_index}
        return reference.linear_cross_entropy(hidden, weight, targets, bias, **options)
    rows = hidden.to(_product_dtype(hidden)).reshape(-1, hidden.shape[-1])
    needs_grad = torch.is_grad_enabled()
    wants = [t is not None and needs_grad and t.requires_grad for t in (rows, weight, bias)]
    settings = scale, softcap or 0.0, ignore_index, chunk or 0, wants
    given = rows, weight, bias, targets.flatten()
    if any(wants):
        return LinearCrossEntropy.apply(chosen, settings, *given)  # pyright: ignore
    return FORWARD[chosen](HeadLoss(*given, *settings))[0]


class LinearCrossEntropy(torch.autograd.Function):
    """The sum, of hidden states, weight and bias; their gradients are ready before it is."""

    @staticmethod
    def forward(ctx, backend, settings, hidden, weight, bias, targets):
        total, gradients = FORWARD[backend](HeadLoss(hidden, weight, bias, targets, *settings))
        ctx.save_for_backward(*gradients)
        ctx.wants, ctx.backend = settings[-1], backend
        return total

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        refuse_batched("linear_cross_entropy", ctx.backend, grad)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            no_derivative(ctx)
        ready = iter(ctx.saved_tensors)
        scaled = [next(ready) * grad if is_wanted else None for is_wanted in ctx.wants]
        return None, None, *scaled, None


def by_chunks(given: HeadLoss, row_losses: RowLosses) -> HeadLossResults:
    hidden, wide = given.hidden, _wide(given)
    tokens, vocabulary = len(hidden), len(given.weight)
    rows = given.chunk or _balanced(tokens, vocabulary)
    weight = given.weight.to(hidden.dtype)  # once, not a chunk
    bias = None if given.bias is None else given.bias.to(hidden.dtype)
    losses = hidden.new_empty(tokens, dtype=wide)
    sums = _Sums(given, weight, wide)
    memory = hidden.new_empty(min(rows, tokens), _rounded_up(vocabulary))[:, :vocabulary]
    for start in range(0, tokens, rows):
        part = slice(start, start + rows)
        x = hidden[part]
        logits = memory[: len(x)]
        if bias is None:
            torch.mm(x, weight.t(), out=logits)
        else:
            torch.addmm(bias, x, weight.t(), out=logits)
        losses[part] = row_losses(logits, given.targets[part], given)
        sums.add(part, x, logits)
    return losses.sum(), sums.as_wanted()


class _Sums:
    """The gradients that are wanted, while those of chunks of logits are added to them."""

    def __init__(self, given: HeadLoss, weight: Tensor, wide: torch.dtype) -> None:
        of_hidden, of_weight, of_bias = given.wants
        self.given, self.head = given, weight
        self.hidden = torch.empty_like(given.hidden) if of_hidden else None
        self.weight = torch.zeros_like(weight, dtype=wide) if of_weight else None
        self.bias = weight.new_zeros(len(weight), dtype=wide) if of_bias else None

    def add(self, part: slice, x: Tensor, gradient: Tensor) -> None:
        if self.hidden is not None:
            torch.mm(gradient, self.head, out=self.hidden[part])
        if self.weight is not None:
            _add_product(self.weight, gradient.t(), x)
        if self.bias is not None:
            self.bias.add_(gradient.sum(0, dtype=self.bias.dtype))

    def as_wanted(self) -> list[Tensor]:
        sums = [total for total in (self.hidden, self.weight, self.bias) if total is not None]
        return [total.to(t.dtype) for total, t in zip(sums, self.given.wanted, strict=True)]


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    if total.dtype == b.dtype:
        total.addmm_(a, b)
    elif total.is_cuda:  # the product is added as it is summed, in fp32
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.add_(a @ b)


def _row_losses(logits: Tensor, targets: Tensor, given: HeadLoss) -> Tensor:
    """With torch's own operations, in place."""
    z = reference.widen(logits)
    if given.scale != 1.0:
        z.mul_(given.scale)
    slope = None
    if given.softcap:
        z.div_(given.softcap).tanh_()
        slope = 1.0 - z.square() if any(given.wants) else None
        z.mul_(given.softcap)
    is_ignored = targets == given.ignore_index
    places = targets.masked_fill(is_ignored, 0).unsqueeze(-1)
    lse = z.logsumexp(-1, keepdim=True)
    losses = (lse - z.gather(-1, places)).squeeze(-1).masked_fill_(is_ignored, 0.0)
    if any(given.wants):
        z.sub_(lse).exp_()
        z.scatter_add_(-1, places, z.new_full(places.shape, -1.0))
        if slope is not None:
            z.mul_(slope)
        if given.scale != 1.0:
            z.mul_(given.scale)
        z.masked_fill_(is_ignored.unsqueeze(-1), 0.0)
        if z is not logits:
            logits.copy_(z)
    return losses


def _balanced(tokens: int, vocabulary: int) -> int:
    """Rows of chunks that are about equal and hold about CHUNK_LOGITS numbers at most."""
    chunks = -(-tokens * vocabulary // CHUNK_LOGITS)
    return _rounded_up(-(-tokens // max(1, chunks)))


def _rounded_up(count: int) -> int:
    return max(1, -(-count // MULTIPLE)) * MULTIPLE


def _wide(given: HeadLoss) -> torch.dtype:
    return torch.promote_types(given.hidden.dtype, torch.float32)


def _product_dtype(hidden: Tensor) -> torch.dtype:
    """Of the product of a head with ``hidden``, as autocast would have it."""
    device = hidden.device.type
    if hidden.dtype == torch.float64 or not is_autocast(device):
        return hidden.dtype
    return torch.get_autocast_dtype(device)


def _check(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    softcap: float | None,
    chunk: int | None,
) -> None:
    width = hidden.shape[-1] if hidden.ndim else 0
    if weight.ndim != 2 or weight.shape[1] != width:
        raise DepthrouteError(
            f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)} do not fit; give "
            "[..., D] and [V, D]"
        )
    if targets.shape != hidden.shape[:-1] or targets.dtype != torch.int64:
        raise DepthrouteError(
            f"targets are {targets.dtype} of shape {tuple(targets.shape)}; hidden "
            f"{tuple(hidden.shape)} needs int64 of shape {tuple(hidden.shape[:-1])}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise DepthrouteError(
            f"bias has shape {tuple(bias.shape)}; a weight {tuple(weight.shape)} needs "
            f"[{weight.shape[0]}]"
        )
    if weight.dtype != hidden.dtype and not is_autocast(hidden.device.type):
        raise DepthrouteError(
            f"hidden is {hidden.dtype} and weight {weight.dtype}; cast one of them, or use autocast"
        )
    for name, tensor in (("weight", weight), ("targets", targets), ("bias", bias)):
        if tensor is not None and tensor.device != hidden.device:
            raise DepthrouteError(
                f"{name} is on {tensor.device} and hidden on {hidden.device}; move them to one "
                "device"
            )
    if softcap is not None and not softcap > 0:
        raise DepthrouteError(f"softcap={softcap} must be above 0; leave it out for none")
    if chunk is not None and chunk < 1:
        raise DepthrouteError(
            f"chunk={chunk} must be at least 1 token; leave it out to have it chosen"
        )
