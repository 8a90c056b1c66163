"""What a depth mix is made of, as one record: what every backend takes and every op declares.

The fields of a record are the arguments of its op in their order, so ``op(*record)`` calls it and
``Mix(*arguments)`` is the record again: nothing is known by its position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

NUM_TENSORS = 7
"""Of a mix, besides its sources."""
LEAST_GAIN = 2.0**-60
"""The product with it has lost nothing of the other factor, in dtypes with fp32's exponents."""
dtype_of: Callable[[Tensor], torch.dtype] = vars(torch._C.TensorBase)["dtype"].__get__
"""For map(), which is faster than a comprehension."""


class Mix(NamedTuple):
    """The boundary between two sublayers, as :func:`~depthroute.ops.depth_boundary` has it. Tensors
    are [..., D]."""

    sources: list[Tensor]
    query: Tensor
    """With the gain of the keys in it."""
    residual: Tensor | None
    prior: Tensor | None
    """The output of a finished group [..., D], and its log-sum-exp [..., H]."""
    prior_lse: Tensor | None
    norm_weight: Tensor | None
    output: Tensor | None
    partial: Tensor | None
    reads_last: bool
    eps: float
    heads: int
    slice_norm: bool
    offset: int
    """Added to every weight: 1, or -1 for -1/S."""
    scale: float
    norm_eps: float
    dtype: torch.dtype
    """Of x."""
    sweeps_once: bool = False
    """Whether backward takes delta from x, so that it reads streamed sources once."""
    keeps_x: bool = True
    keeps_y: bool = False
    """Whether backward takes the norm's input from y. No gain may hide it there, so that one nearer
    to zero than ``LEAST_GAIN`` counts as that."""

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """All but the sources."""
        return self[1 : 1 + NUM_TENSORS]

    def keeping(self, needs_grad: bool, returns_x: bool) -> Mix:
        """With what is kept for a backward in one kernel.

        Where both directions hold all sources, the gradient of a norm does without x: it takes it
        from y, which the sublayer keeps anyway, or mixes again where that needs no state; neither
        costs traffic. fp16 has not the exponents for what a small gain leaves of x in y.

        Where they are streamed, delta is taken from x, to the bits of fp32: not where x is more
        than the mix (a residual, or weights with an offset).
        """
        count, width, dtype = self.num_read, self.query.shape[0], self.dtype
        rows = *self.sources, self.output, self.partial, self.residual, self.prior
        keeps_x = returns_x or self.norm_weight is None
        keeps_x = keeps_x or any(row is not None and row.dtype != dtype for row in rows)
        keeps_x = keeps_x or not fits(count, width, dtype.itemsize)
        keeps_y = not keeps_x and self.residual is not None and dtype != torch.float16
        once = needs_grad and count > 0 and self.residual is None and not self.offset
        if once:
            itemsize = (self.sources[0] if self.sources else self.example).element_size()
            once = not fits(count, width, itemsize)
        return Mix._make((*self[:16], once, keeps_x, needs_grad and keeps_y))

    def dtypes(self) -> tuple[Any, ...]:
        """With dtypes in place of tensors and without fractions: what kernels are chosen by."""
        sources, query, a, b, c, d, e, f, reads_last, _, heads, slices, offset, _, _, *kept = self
        dtypes = [None if t is None else t.dtype for t in (query, a, b, c, d, e, f)]
        numbers = reads_last, 0.0, heads, slices, offset, 0.0, 0.0
        return tuple(map(dtype_of, sources)), *dtypes, *numbers, *kept

    @property
    def example(self) -> Tensor:
        """Some tensor of the shape of x."""
        if self.prior is not None:
            return self.prior
        return self.sources[0] if self.output is None else self.output

    @property
    def num_read(self) -> int:
        """Of the sources that are read."""
        return len(self.sources) + self.reads_last

    @property
    def num_scores(self) -> int:
        """Numbers that the torch backward needs of a token: S x H logits and S (or S x H) 1/rms."""
        return self.num_read * (self.heads + num_norms(self))

    @property
    def stats_width(self) -> int:
        """Numbers that the Triton backward does: also H log-sum-exps and a norm's 1/rms."""
        return self.num_scores + self.heads + (self.norm_weight is not None)

    @property
    def keeps_low(self) -> bool:
        """Whether the bits of x that ``dtype`` has no room for are a result too."""
        return self.sweeps_once and self.dtype.itemsize < 4

    @property
    def results(self) -> tuple[bool, ...]:
        """Whether there are x, y, state, last and low bits, beside the statistics."""
        pushes, has_norm = self.output is not None, self.norm_weight is not None
        pushed = pushes and self.residual is not None, pushes and self.partial is not None
        return self.keeps_x, has_norm, *pushed, self.keeps_low

    def pushed(self) -> tuple[Mix, Tensor | None]:
        """What is left to do when the output has been pushed; and last, unless it is the output."""
        output, state, sources = self.output, self.residual, self.sources
        if output is None:
            return self, None
        state = None if state is None else state + output
        last = None if self.partial is None else self.partial + output
        sources = [*sources, output if last is None else last] if self.reads_last else sources
        left = sources, self.query, state, *self[3:6], None, None, False
        return Mix._make((*left, *self[9:])), last


class Mixed(NamedTuple):
    """The results of a mix."""

    stats: Tensor
    """[..., K], in an order of the backend's own."""
    x: Tensor | None
    y: Tensor | None
    state: Tensor | None
    last: Tensor | None
    low: Tensor | None


class MixBackward(NamedTuple):
    """What a mix was made of, as far as backward needs it, and the gradients that reach it."""

    grad: Tensor | None
    """Of x."""
    grads_y: list[Tensor]
    """Their sum is that of y: one, or after :mod:`depthroute.ops.private.inductor` one for every
    projection that reads y."""
    grad_state: Tensor | None
    grad_last: Tensor | None
    carried: list[Tensor]
    """Gradients of the sources from elsewhere, to be added: one for each, or none."""
    sources: list[Tensor]
    """All that were read, the last among them."""
    query: Tensor
    prior: Tensor | None
    prior_lse: Tensor | None
    norm_weight: Tensor | None
    x: Tensor | None
    """Needed by a norm, and where delta is taken from it, with ``low`` if it has any. In its place,
    if ``from_y``, y; where a backward mixes again, the state that the mix is added to, if there is
    one."""
    low: Tensor | None
    stats: Tensor
    heads: int
    slice_norm: bool
    offset: int
    scale: float
    reads_last: bool
    writes_output: bool
    """Whether the output's gradient is another than the state's or the last source's."""
    sweeps_once: bool
    mixes_again: bool
    from_y: bool
    state_dtype: torch.dtype | None
    """Of the residual's gradient, where it is not simply that of x."""

    def dtypes(self) -> tuple[Any, ...]:
        """As :meth:`Mix.dtypes`."""
        tensors = self.grad, self.grad_state, self.grad_last, *self[6:13]
        grad, state, last, *kept = [None if t is None else t.dtype for t in tensors]
        lists = self.grads_y, self.carried, self.sources
        terms, carried, sources = [tuple(map(dtype_of, tensors)) for tensors in lists]
        heads, slice_norm, offset, _, *flags = self[13:]
        settings = heads, slice_norm, offset, 0.0, *flags
        return grad, terms, state, last, carried, sources, *kept, *settings


def num_norms(record: Mix | MixBackward | Group | GroupBackward) -> int:
    """Of a source and token."""
    return record.heads if record.slice_norm else 1


class Group(NamedTuple):
    """Phase 1: queries [G, D] over finished sources [N, D]."""

    sources: list[Tensor]
    queries: Tensor
    eps: float
    heads: int
    slice_norm: bool
    dtype: torch.dtype
    """Of the outputs."""


class GroupBackward(NamedTuple):
    grads: list[Tensor]
    """Of every query's output [N, D]."""
    grad_lse: Tensor
    carried: list[Tensor]
    sources: list[Tensor]
    queries: Tensor
    rstd: Tensor
    logits: Tensor
    lse: Tensor
    heads: int
    slice_norm: bool


class AttentionMix(NamedTuple):
    """Depth attention: query [B, Hq, T, d], keys and values [B, Hkv, T, d|dv] over layers."""

    query: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    scaling: float


class AttentionBackward(NamedTuple):
    grads: list[Tensor]
    """One or two, whose sum is that of the mixed value."""
    carried: list[Tensor]
    """Gradients of query, keys and values from elsewhere, to be added."""
    places: list[int]
    """Of what each is: 0 is the query, the keys follow and then the values. The last key may be
    there twice."""
    query: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    kept: list[Tensor]
    """The second result of forward."""
    scaling: float

    def arrived(self) -> list[list[Tensor]]:
        """What is to be added, at every place."""
        found: list[list[Tensor]] = [[] for _ in range(1 + 2 * len(self.keys))]
        for place, grad in zip(self.places, self.carried, strict=True):
            found[place].append(grad)
        return found


MixResults = tuple[Tensor, list[Tensor]]
"""stats [..., K] and, of x, y, state, last and low bits [..., D], those there are."""
MixGradients = tuple[list[Tensor], Tensor, list[Tensor]]
"""Of the sources; of query and, if given, norm weight [1|2, D]; and, as far as there are any, of
prior, prior_lse, residual (if ``state_dtype``) and output (if ``writes_output``)."""
GroupResults = tuple[Tensor, Tensor, Tensor, Tensor]
"""outputs [G, N, D], lse [G, N, H], and 1/rms and logits in an order of the backend's own."""
GroupGradients = tuple[list[Tensor], Tensor]
"""Of the sources and the queries."""

AttentionResults = tuple[Tensor, list[Tensor]]
"""Mixed values [B, Hkv, T, dv], and what gives the weights [J, B, Hkv, T]: themselves (torch), or
logits and their log-sum-exp [B, Hkv, T] (Triton)."""
AttentionGradients = tuple[Tensor, list[Tensor], list[Tensor]]
"""Of query, keys and values, with what was carried."""


def fake_mix(*arguments) -> MixResults:
    mix = Mix(*arguments)
    x = mix.example.new_empty(mix.example.shape, dtype=mix.dtype)
    like: Any = zip((x, x, mix.residual, mix.partial, x.short()), mix.results, strict=True)
    others = [t.new_empty(t.shape) for t, is_there in like if is_there]
    return mix.query.new_empty(*x.shape[:-1], mix.num_scores), others


def fake_mix_triton(*arguments) -> MixResults:
    stats, others = fake_mix(*arguments)
    return stats.new_empty(*stats.shape[:-1], Mix(*arguments).stats_width), others


def fake_mix_backward(*arguments) -> MixGradients:
    back = MixBackward(*arguments)
    query, shape = back.query, (*back.stats.shape[:-1], back.query.shape[0])
    others = [t.new_empty(t.shape) for t in (back.prior, back.prior_lse) if t is not None]
    if back.state_dtype is not None:
        count = 1 + back.writes_output
        others += [query.new_empty(shape, dtype=back.state_dtype) for _ in range(count)]
    num_weights = 1 if back.norm_weight is None else 2
    dsources = [s.new_empty(s.shape) for s in back.sources]
    return dsources, query.new_empty(num_weights, query.shape[0]), others


def fake_group(*arguments) -> GroupResults:
    group = Group(*arguments)
    queries, (tokens, width) = group.queries, group.sources[0].shape
    count, num_sources = queries.shape[0], len(group.sources)
    return (
        queries.new_empty(count, tokens, width, dtype=group.dtype),
        queries.new_empty(count, tokens, group.heads),
        queries.new_empty(tokens, num_sources, num_norms(group)),
        queries.new_empty(tokens, num_sources, count, group.heads),
    )


def fake_group_backward(*arguments) -> GroupGradients:
    back = GroupBackward(*arguments)
    return [s.new_empty(s.shape) for s in back.sources], back.queries.new_empty(back.queries.shape)


def fake_attention(*arguments) -> AttentionResults:
    mix = AttentionMix(*arguments)
    statistics = torch.promote_types(mix.query.dtype, torch.float32)
    weights = mix.query.new_empty(len(mix.keys), *mix.keys[0].shape[:3], dtype=statistics)
    return mix.values[-1].new_empty(mix.values[-1].shape), [weights]


def fake_attention_triton(*arguments) -> AttentionResults:
    mix = AttentionMix(*arguments)
    shape = mix.keys[0].shape[:3]
    logits = mix.query.new_empty(len(mix.keys), *shape, dtype=torch.float32)
    return rows_like(mix.values[-1]), [logits, logits.new_empty(shape)]


def fake_attention_backward(*arguments) -> AttentionGradients:
    back = AttentionBackward(*arguments)
    dkeys, dvalues = (
        [k.new_empty(k.shape) for k in back.keys],
        [v.new_empty(v.shape) for v in back.values],
    )
    return back.query.new_empty(back.query.shape), dkeys, dvalues


def fake_attention_triton_backward(*arguments) -> AttentionGradients:
    return attention_gradients(AttentionBackward(*arguments))


def attention_gradients(back: AttentionBackward) -> AttentionGradients:
    """Where the kernel writes: as query, keys and values lie, if those of all layers are alike. So
    a compiled graph, whose results they are, takes their gradients: it would copy any others."""
    return rows_like(back.query), _all_like(back.keys), _all_like(back.values)


def rows_like(tensor: Tensor) -> Tensor:
    """New rows in the same order; the kernels write the elements of a row side by side."""
    return torch.empty_like(tensor) if tensor.stride(-1) == 1 else tensor.new_empty(tensor.shape)


def _all_like(tensors: Sequence[Tensor]) -> list[Tensor]:
    """:func:`rows_like`, in one order."""
    strides = [*map(Tensor.stride, tensors)]
    if strides[0][-1] == 1 and strides.count(strides[0]) == len(strides):
        return list(map(torch.empty_like, tensors))
    return [t.new_empty(t.shape) for t in tensors]


RESIDENT_SOURCES = 17
RESIDENT_BYTES = 73 * 1024
"""Of the rows of a token that one program holds in registers: 5 of width 7168 in bf16, 9 of 4096,
12 of 2048, 17 of 1024."""
WIDE_ROW, PADDED_ROW = 12 * 1024, 16 * 1024
"""Bytes of a row beyond which it takes the room of the second, of which five fit."""
PADDED_SOURCES, NARROW_SOURCES = 9, 13
"""Of a width that is far below a power of two, and of one so that is below 768."""


def most_that_fit(width: int, itemsize: int) -> int:
    """Rows of a token that fit one program, and are better off there: 17 rows of 2048 do fit, and
    reached 0.78 of the copy speed; streamed they reach 0.89 (docs/negative-results.md)."""
    row = width * itemsize
    if WIDE_ROW < row <= PADDED_ROW:
        return 5
    few, many = RESIDENT_BYTES // row, RESIDENT_BYTES // 2 // row
    most = min(many, RESIDENT_SOURCES) if many > 12 else min(few, 12)
    lanes = 1 << (width - 1).bit_length()
    if width > 256 and 4 * width < 3 * lanes:
        most = min(most, PADDED_SOURCES if width > 768 else NARROW_SOURCES)
    return most


def fits(rows: int, width: int, itemsize: int) -> bool:
    """Whether so many rows of a token fit one program, and are better off there."""
    return 0 < rows <= most_that_fit(width, itemsize)
