"""Single kernels at the sizes of a model, with the launch settings that are worth a try.

A :class:`Case` is one kernel at one shape. Its passes are the fewest reads and writes of an [N, D]
activation, as docs/kernels.md counts them. Settings are those around the ones in use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from depthroute import ops
from depthroute.bench import accuracy, timing
from depthroute.bench.operators import Shape, num_tokens, our_mix
from depthroute.errors import unknown

Setting = dict[str, int]
"""Fields of a launch in ``ops/_triton/layout.py``; with none, the launch is the one in use."""
Launched = Callable[[], Sequence[Tensor]]
Made = TypeVar("Made")


@dataclass(frozen=True)
class Case:
    kernel: str
    shape: str
    forces: str
    """What :func:`layout.forced` calls the kernel."""
    launch: Launched
    num_bytes: float
    """The fewest that it could move."""
    settings: Sequence[Setting]


@dataclass(frozen=True)
class Job:
    """The cases of one shape, drawn when their turn comes."""

    name: str
    cases: Callable[[], list[Case]]


def named(fields: str, *values: tuple[int, ...]) -> list[Setting]:
    """One setting for each tuple: ``named("warps stages", (4, 3), (8, 2))``."""
    return [dict(zip(fields.split(), numbers, strict=True)) for numbers in values]


def power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


def normals(device: torch.device, seed: int) -> Callable[..., Tensor]:
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=generator)

    return normal


def on_capture_stream(function: Callable[[], Made], device: torch.device) -> Made:
    """What a forward makes there, so that its backward can be captured alone."""
    if device.type != "cuda":
        return function()
    stream = timing.capture_stream(device)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        made = function()
    torch.cuda.current_stream().wait_stream(stream)
    return made


# the depth mix

MIX = "sources warps stages programs"


def mix_forward_settings(width: int) -> Iterator[Setting]:
    if takes_tiles(width):
        for columns, warps in tilings(width):
            rest = (1, 3, 0), (2, 3, 0), (2, 3, 4)
            yield from (_tiled(columns, warps, *r) for r in rest)
        return
    few = max(1, power_of_two(width) // 2048)
    for warps in sorted({max(1, few // 2), few, 2 * few}):
        for at_once in (1, 2, 4):
            if warps <= 16 and at_once * width <= warps * 4096:
                rest = (1, 0), (3, 0), (3, max(1, 16 // warps))
                yield from named(MIX, *((at_once, warps, *r) for r in rest))


def mix_backward_settings(width: int) -> Iterator[Setting]:
    """Up to 8 columns a thread; kernels that hold all sources have no use for ``sources``."""
    if takes_tiles(width):
        for columns, warps in tilings(width):
            rest = (3, max(1, 8 // warps)), (3, max(1, 16 // warps)), (2, max(1, 8 // warps))
            yield from (_tiled(columns, warps, 1, *r) for r in dict.fromkeys(rest))
        return
    few = max(1, power_of_two(width) // 1024)
    for warps in (few, 2 * few, 4 * few):
        for at_once in (1, 2):
            if warps <= 16 and at_once * width <= warps * 2048:
                for stages in (1, 2, 3):
                    for programs in sorted({max(1, 8 // warps), max(1, 16 // warps)}):
                        yield from named(MIX, (at_once, warps, stages, programs))


def takes_tiles(width: int) -> bool:
    """Whether its tiles are a choice."""
    return width > 512 and width != power_of_two(width)


def tilings(width: int) -> Iterator[tuple[int, int]]:
    """Columns of a tile and warps, for a width that is no power of two: a single tile, or those
    whose padding is at most a third; a thread reads 8 to 32 bytes of each, 64 numbers in all."""
    for columns in (c for c in (256, 512, 1024, 2048, 4096, 8192) if c < 2 * width):
        lanes = -(-width // columns) * columns
        if lanes > 8 * columns or (3 * lanes > 4 * width and lanes != columns):
            continue
        for warps in (1, 2, 4, 8, 16):
            if 4 <= columns // (32 * warps) <= 16 and lanes <= 64 * 32 * warps:
                yield columns, warps


def _tiled(columns: int, warps: int, sources: int, stages: int, programs: int) -> Setting:
    (setting,) = named(f"columns {MIX}", (columns, sources, warps, stages, programs))
    return setting


def mix(count: int, width: int, device: torch.device, tokens: int | None = None) -> list[Case]:
    """Both directions of the depth mix, as autograd launches them, after the check."""
    tokens = tokens or num_tokens(count)
    inputs = accuracy.draw(count, tokens, width, device)
    verdict = accuracy.check(our_mix, inputs)
    if not verdict.holds:
        raise ArithmeticError(str(verdict))
    x = on_capture_stream(lambda: our_mix(inputs.sources, inputs.query), device)

    @torch.no_grad()
    def forward() -> Sequence[Tensor]:
        return [our_mix(inputs.sources, inputs.query)]

    def backward() -> Sequence[Tensor]:
        return torch.autograd.grad(
            x, [*inputs.sources, inputs.query], inputs.grad, retain_graph=True
        )

    shape, one_pass = f"{count}x{width}", inputs.grad.nbytes
    settings = list(mix_forward_settings(width)), list(mix_backward_settings(width))
    return [
        Case("mix forward", shape, "mix", forward, (count + 1) * one_pass, settings[0]),
        Case("mix backward", shape, "mix", backward, (2 * count + 1) * one_pass, settings[1]),
    ]


# the boundary between two sublayers

BOUNDARY = "warps stages programs"
ATTNRES, DELTA, PHASE_2 = "attnres", "delta", "phase 2"
"""In a block, over the block's sum; in a block whose sum is the residual state; and over what is
newer than a finished group. The sources counted are those that are mixed, the pushed one among
them, without the group."""
BOUNDARIES = [
    *((ATTNRES, count, 1024) for count in (2, 4, 6, 9)),
    *((DELTA, count, 1024) for count in (2, 4)),
    *((PHASE_2, count, 1024) for count in (3, 7)),
    *((ATTNRES, 4, 2048), (ATTNRES, 9, 2048), (DELTA, 3, 2048)),
    *((ATTNRES, 4, 4096), (ATTNRES, 9, 4096), (DELTA, 2, 4096), (DELTA, 3, 4096)),
]


def boundary_forward_settings(width: int) -> Iterator[Setting]:
    """Around 16 columns a thread, with 4 to 64 warps to a multiprocessor."""
    if takes_tiles(width):
        yield from tiled_boundaries(width, (8, 16))
        return
    usual = max(2, power_of_two(width) // 512)
    for warps in (n for n in (usual // 2, usual, 2 * usual) if n <= 16):
        for stages, totals in ((3, (4, 8, 12, 16, 24, 32, 64)), (2, (16, 32, 64))):
            counts = sorted({max(1, total // warps) for total in totals})
            yield from named(BOUNDARY, *((warps, stages, count) for count in counts))


def boundary_backward_settings(width: int) -> Iterator[Setting]:
    """Around 8 columns a thread, with fewer programs, since each holds more."""
    if takes_tiles(width):
        yield from tiled_boundaries(width, (4, 8))
        return
    usual = max(2, power_of_two(width) // 256)
    for warps in (n for n in (usual // 2, usual, 2 * usual) if n <= 16):
        for stages in (3, 2):
            counts = [n for n in (1, 2, 3, 4, 6, 8) if n == 1 or n * warps <= 32]
            yield from named(BOUNDARY, *((warps, stages, count) for count in counts))


def tiled_boundaries(width: int, totals: Sequence[int]) -> Iterator[Setting]:
    """``totals``: warps to a multiprocessor."""
    for columns, warps in tilings(width):
        counts = sorted({max(1, total // warps) for total in totals})
        for stages in (3, 2):
            numbers = ((columns, warps, stages, count) for count in counts)
            yield from named(f"columns {BOUNDARY}", *numbers)


def boundary_passes(way: str, count: int) -> tuple[int, int]:
    """Forward: output and block sum (or prior), the other sources; block sum and y. Backward: dy,
    sources and what was handed on; their gradients. With a residual state also that and its
    gradient, which is read and written; with a prior also that and its gradient."""
    return {
        ATTNRES: (count + 3, 3 * count + 1),
        DELTA: (count + 4, 3 * count + 4),
        PHASE_2: (count + 2, 3 * count + 3),
    }[way]


def boundary(
    way: str, count: int, width: int, device: torch.device, tokens: int | None = None
) -> list[Case]:
    """Both directions over ``count`` sources, all of which are handed on."""
    tokens = tokens or num_tokens(count)
    normal = normals(device, count * 100_003 + width)

    def rows(wanted: int) -> list[Tensor]:
        return [normal(tokens, width).bfloat16().requires_grad_() for _ in range(wanted)]

    output, held, *sources = rows(count + 2 if way == DELTA else count + 1)
    query = (normal(width) / width**0.5).requires_grad_()
    weight = (1 + 0.1 * normal(width)).bfloat16().requires_grad_()
    inputs = [output, held, *sources, query, weight]
    options: dict[str, Any] = {"reads_last": True, "partial": held}
    if way == DELTA:
        options = {"residual": held, "adds_sources": True, "returns_last": False}
    elif way == PHASE_2:
        lse = normal(tokens, 1).requires_grad_()
        options = {"reads_last": True, "prior": held, "prior_lse": lse}
        inputs.append(lse)

    def results() -> list[Tensor]:
        done = ops.depth_boundary(
            output,
            sources,
            query,
            norm_weight=weight,
            returns_x=False,
            backend="triton",
            **options,
        )
        made = [done.y, done.state, done.last, *done.sources]
        return [t for t in made if t is not None]

    made = on_capture_stream(results, device)
    grads = [normal(tokens, width).bfloat16() for _ in made]

    def forward() -> Sequence[Tensor]:
        with torch.no_grad():
            return results()

    def backward() -> Sequence[Tensor]:
        return torch.autograd.grad(made, inputs, grads, retain_graph=True)

    shape, one_pass = f"{way} {count}x{width}", output.nbytes
    there, back = (passes * one_pass for passes in boundary_passes(way, count))
    settings = list(boundary_forward_settings(width)), list(boundary_backward_settings(width))
    return [
        Case("boundary forward", shape, "mix", forward, there, settings[0]),
        Case("boundary backward", shape, "mix", backward, back, settings[1]),
    ]


# phase 1 on tensor cores

GROUPS = [
    *((8, 8, 768), (16, 9, 768)),
    *((7, 6, 1024), (13, 7, 1024), (20, 8, 1024), (28, 9, 1024), (37, 10, 1024), (47, 10, 1024)),
]
"""Sources, queries and width: those of delta with 12 and 28 layers."""
GROUP_SETTINGS = {
    "group_logits": named(
        "tokens columns warps stages",
        *((256, 64, 8, 3), (256, 64, 8, 4), (256, 64, 4, 3), (256, 32, 8, 4), (256, 128, 8, 2)),
        *((256, 128, 8, 3), (128, 128, 8, 3), (512, 64, 8, 2), (512, 64, 16, 3)),
    ),
    "group_softmax": named("warps", (1,), (2,), (4,)),
    "group_outputs": named(
        "columns warps stages programs",
        *((256, 4, 3, 8), (256, 4, 3, 32), (256, 4, 4, 8), (256, 4, 2, 16), (256, 2, 3, 16)),
        *((256, 8, 3, 16), (128, 4, 3, 32), (128, 4, 4, 16), (512, 4, 2, 8), (512, 4, 3, 8)),
        *((512, 8, 3, 8), (1024, 8, 2, 8)),
    ),
    "group_products": named(
        "sources columns warps stages",
        *((64, 128, 1, 3), (64, 128, 2, 3), (64, 128, 4, 3), (64, 128, 4, 2), (64, 128, 4, 4)),
        *((64, 128, 2, 2), (64, 128, 8, 3)),
        *((64, 256, 4, 3), (64, 256, 4, 2), (64, 256, 8, 3), (64, 64, 4, 4), (32, 256, 4, 3)),
    ),
    "group_weights": named("warps", (1,), (2,), (4,), (8,)),
    "group_sources": named(
        "sources columns warps stages programs",
        *((64, 128, 2, 3, 4), (64, 128, 4, 2, 2), (64, 128, 4, 2, 4), (64, 128, 8, 2, 2)),
        *((64, 64, 4, 3, 4), (64, 256, 8, 2, 2), (32, 128, 2, 3, 4), (32, 128, 4, 2, 4)),
        *((32, 128, 4, 3, 2), (32, 128, 4, 3, 4), (32, 128, 4, 4, 2), (32, 64, 4, 3, 4)),
        *((32, 256, 4, 2, 2), (32, 256, 4, 3, 2), (32, 256, 8, 3, 2), (16, 128, 4, 3, 4)),
        *((16, 256, 4, 2, 4), (16, 256, 4, 3, 2)),
    ),
}


def group(
    count: int, num_queries: int, width: int, device: torch.device, tokens: int = 16384
) -> list[Case]:
    """Every kernel alone, on what those before it made; gradients are handed on."""
    from depthroute.ops._triton import dot_launch, layout

    normal = normals(device, count * 100_003 + width)
    sources, carried = ([normal(tokens, width).bfloat16() for _ in range(count)] for _ in range(2))
    queries = normal(num_queries, width) / width**0.5
    grad, grad_lse = normal(num_queries, tokens, width).bfloat16(), normal(num_queries, tokens, 1)
    packed, packed_grads = layout.pack([sources, [*grad]], queries)

    def logits() -> list[Tensor]:
        rstd, out = queries.new_empty(tokens, count, 1), queries.new_empty(*stats)
        dot_launch.run_logits(packed, queries, 1e-6, rstd, out)
        return [rstd, out]

    def softmax() -> list[Tensor]:
        lse = torch.empty_like(grad_lse)
        return [lse, dot_launch.run_softmax(made_logits, lse, grad.dtype)]

    def outputs() -> list[Tensor]:
        out = torch.empty_like(grad)
        dot_launch.run_outputs(packed, made_weights, out)
        return [out]

    def products() -> list[Tensor]:
        u = torch.empty_like(made_logits)
        dot_launch.run_products(packed, packed_grads, width, u)
        return [u]

    def weights() -> list[Tensor]:
        return [*dot_launch.run_weights(made_logits, lse, grad_lse, rstd, u, width)]

    def source_gradients() -> list[Tensor]:
        """With the table of addresses, since the gradients are new."""
        dsources = [torch.empty_like(s) for s in sources]
        tables = layout.pack([sources, dsources, carried], queries)
        partial = dot_launch.run_sources(tables, packed_grads, queries, coefficients, pull)
        return [*dsources, partial.sum(0)]

    stats = tokens, count, num_queries, 1
    rstd, made_logits = logits()
    lse, made_weights = softmax()
    (u,) = products()
    coefficients, pull = weights()
    one_pass, scalars = sources[0].nbytes, made_logits.nbytes
    made: dict[str, tuple[Launched, float]] = {
        "group_logits": (logits, count * one_pass),
        "group_softmax": (softmax, scalars + made_weights.nbytes),
        "group_outputs": (outputs, (count + num_queries) * one_pass),
        "group_products": (products, (count + num_queries) * one_pass),
        "group_weights": (weights, 2 * scalars + coefficients.nbytes),
        "group_sources": (source_gradients, (3 * count + num_queries) * one_pass),
    }
    shape = f"{count}x{width}, {num_queries} queries"
    return [
        Case(name, shape, name, launch, num_bytes, GROUP_SETTINGS[name])
        for name, (launch, num_bytes) in made.items()
    ]


# depth attention

ATTENTION_LAYERS = (2, 3)


def attention_settings(head_width: int) -> Iterator[Setting]:
    """From 4 to 16 elements of a row a thread."""
    for elements in (256, 512, 1024, 2048):
        rows = elements // power_of_two(head_width)
        for warps in (1, 2, 4, 8):
            if rows > 0 and 4 <= elements // (32 * warps) <= 16:
                yield from named("rows warps", (rows, warps))


def attention(
    layers: int,
    device: torch.device,
    *,
    batch: int = 8,
    length: int = 2048,
    heads: int = 8,
    repeats: int = 2,
    head_width: int = 128,
) -> list[Case]:
    """Both directions over so many layers, through the registered ops. Backward as in the middle
    of a model: attention over time sends gradients of query, key and mixed value, and later layers
    those of all earlier ones."""
    normal = normals(device, layers)

    def draw(num_heads: int) -> Tensor:
        return normal(batch, length, num_heads, head_width).bfloat16().transpose(1, 2)

    query, grad = draw(heads * repeats), draw(heads)
    keys, values = ([draw(heads) for _ in range(layers)] for _ in range(2))
    given, scaling = (query, keys, values), head_width**-0.5
    places = [0, layers, *range(1, layers), *range(1 + layers, 2 * layers)]
    carried = [draw(heads * repeats), *(draw(heads) for _ in places[1:])]
    _, kept = torch.ops.depthroute.depth_attention_mix_triton.default(*given, scaling)

    def forward() -> Sequence[Tensor]:
        mixed, kept = torch.ops.depthroute.depth_attention_mix_triton.default(*given, scaling)
        return [mixed, *kept]

    def backward() -> Sequence[Tensor]:
        dquery, dkeys, dvalues = torch.ops.depthroute.depth_attention_mix_triton_backward.default(
            [grad], carried, places, *given, kept, scaling
        )
        return [dquery, *dkeys, *dvalues]

    shape, one_pass = f"{layers} layers of {heads}x{head_width}", grad.nbytes
    settings = list(attention_settings(head_width))
    there, back = (repeats + 2 * layers + 1) * one_pass, (3 * repeats + 6 * layers) * one_pass
    return [
        Case("attention forward", shape, "attention", forward, there, settings),
        Case("attention backward", shape, "attention", backward, back, settings),
    ]


KINDS = ("mix", "boundary", "group", "attention")


def parse(text: str) -> list[str]:
    """``"all"`` or kinds of kernels separated by commas."""
    names = [part.strip() for part in (",".join(KINDS) if text == "all" else text).split(",")]
    for name in names:
        if name not in KINDS:
            raise unknown("kernel", name, ["all", *KINDS])
    return names


def jobs(
    kinds: Sequence[str],
    mix_shapes: Sequence[Shape],
    device: torch.device,
    *,
    boundaries: Sequence[tuple[str, int, int]] = BOUNDARIES,
    tokens: int | None = None,
) -> list[Job]:
    """Shape by shape; those of the mix and of the boundary can be chosen. With ``tokens``, so many
    of each, as far as those two go."""
    few = {} if tokens is None else {"tokens": tokens}
    of_kind: dict[str, list[tuple[Callable[..., list[Case]], tuple[Any, ...]]]] = {
        "mix": [(mix, shape) for shape in mix_shapes],
        "boundary": [(boundary, shape) for shape in boundaries],
        "group": [(group, shape) for shape in GROUPS],
        "attention": [(attention, (layers,)) for layers in ATTENTION_LAYERS],
    }
    return [
        Job(
            f"{kind} {'x'.join(map(str, shape))}",
            partial(cases, *shape, device, **(few if kind in ("mix", "boundary") else {})),
        )
        for kind in kinds
        for cases, shape in of_kind[kind]
    ]
