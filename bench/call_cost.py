"""What one call of the registered kernels costs the CPU, from the op to the driver's launch.

    python bench/call_cost.py [--profile] [--rounds 15]

With a GPU the calls are real and only their enqueueing is timed. Without one the kernels are
compiled for Hopper and a launcher that does nothing takes the driver's place, so that everything
above it is timed; what it leaves out is the driver itself and the allocator of the GPU. Times are
the least of several rounds: what else the machine does only adds to them.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import sys
import timeit
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

root = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(root), str(root / "src")]

from depthroute.ops import backends  # noqa: E402

TOKENS, WIDTH, SOURCES = 64, 768, 4


def pretend() -> None:
    from tests.kernels.hopper import HopperDriver
    from triton.runtime import driver

    driver.set_active(HopperDriver())  # pyright: ignore[reportArgumentType]
    backends.INTERPRETS = True  # lets CPU tensors through to the launchers


def calls(device: str) -> dict[str, Callable[[], object]]:
    """The boundary of delta in blocks, both directions, as a compiled graph calls it; the same
    through autograd; depth attention over three layers."""

    def rows() -> torch.Tensor:
        return torch.randn(TOKENS, WIDTH, device=device).bfloat16()

    from depthroute import ops

    ns = torch.ops.depthroute
    sources, output, state, partial = [rows() for _ in range(SOURCES)], rows(), rows(), rows()
    query, weight = torch.randn(WIDTH, device=device), torch.ones(WIDTH, device=device)
    options = 1e-6, 1, False, False, 0.5, 1e-6, torch.bfloat16, False, False, True

    def forward():
        return ns.depth_mix_triton.default(
            sources, query, state, None, None, weight, output, partial, True, *options
        )

    made = forward()
    stats, (y, _, last) = made
    carried = [rows() for _ in range(SOURCES + 1)]
    grads = None, [rows()], rows(), None

    def backward():
        return ns.depth_mix_triton_backward.default(
            *grads, carried, [*sources, last], query, None, None, weight, y, None, stats,
            1, False, False, 0.5, True, True, False, False, True, torch.bfloat16,
        )  # fmt: skip

    heads = 4, 2, TOKENS, 64
    q, g = (torch.randn(heads, device=device).bfloat16() for _ in range(2))
    keys, values = ([torch.randn(heads, device=device).bfloat16() for _ in range(3)] for _ in "kv")
    handed = [0, 3, 1, 4, 2, 5]  # query and key from attention, two anchors from later layers

    def attention():
        return ns.depth_attention_mix_triton.default(q, keys, values, 0.125)

    _, *kept = attention()

    def attention_backward(handed=()):
        return ns.depth_attention_mix_triton_backward.default(
            [g], [g] * len(handed), handed, q, keys, values, *kept, 0.125
        )

    leaves = [t.clone().requires_grad_() for t in (*sources, output, state, partial)]
    weights = query.clone().requires_grad_(), weight.clone().requires_grad_()
    key_weight = torch.ones_like(query)

    def eager():
        return ops.depth_boundary(
            leaves[-3], leaves[:SOURCES], weights[0], key_weight, leaves[-2], leaves[-1],
            reads_last=True, scale=0.5, norm_weight=weights[1], backend="triton",
        )  # fmt: skip

    def eager_both():
        done = eager()
        kept = [done.y, done.state, done.last, *done.sources]
        return torch.autograd.grad(kept, [*leaves, *weights], [output] * len(kept))

    made = {
        "boundary forward": forward,
        "boundary backward": backward,
        "attention forward": attention,
        "attention backward": attention_backward,
        "attention backward, handed": lambda: attention_backward(handed),
    }
    made |= {"eager boundary forward": eager, "eager boundary, both": eager_both}
    return made | places(leaves, weights[1])


def places(
    leaves: list[torch.Tensor], norm_weight: torch.Tensor
) -> dict[str, Callable[[], object]]:
    """What an eager model does between two sublayers, with delta in blocks: push, read and norm."""
    from depthroute import RoutingConfig, nn

    plan = RoutingConfig("delta", num_blocks=4).resolve(12, width=WIDTH)
    sites = nn.Sites(plan, WIDTH).to(leaves[0].device)
    norm, outputs = nn.PreNorm(torch.nn.Identity(), norm_weight), leaves[1:3]
    stream = nn.ResidualStream.start(leaves[0], plan, sites=sites)
    stream = replace(stream, backend="triton")  # also where the driver is none
    for index in range(18):
        stream = stream.read(sites.at(index), norm)[1].push(leaves[1 + index % 2])
    site = sites.at(19)
    assert site is not None
    parameters = site()

    def place():
        return stream.push(outputs[0]).read(parameters, norm)

    return {"eager place": place}


def microseconds(call: Callable[[], object], rounds: int, number: int = 500) -> float:
    for _ in range(10):
        call()
    torch.cuda.synchronize() if torch.cuda.is_available() else None
    return 1e6 * min(timeit.repeat(call, number=number, repeat=rounds)) / number


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", action="store_true", help="where the time goes")
    parser.add_argument("--rounds", type=int, default=15, help="the least of so many counts")
    wanted = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        pretend()
    for name, call in calls(device).items():
        # inside a compiled graph, as in an autograd.Function, nothing is recorded
        with torch.set_grad_enabled(name.startswith("eager")):
            print(f"{name:<28} {microseconds(call, wanted.rounds):7.1f} us", flush=True)
            if wanted.profile:
                with cProfile.Profile() as profile:
                    for _ in range(300):
                        call()
                pstats.Stats(profile).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
