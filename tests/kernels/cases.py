"""What a kernel is held to, on the CPU interpreter and on a GPU alike.

Error budget: ``exact`` is the definition in fp64, ``native`` the definition in the working dtype;
the kernel may be at most twice as far from ``exact`` as ``native`` is. A result that native gets
exactly right, or to within a few units of fp32, is allowed those few units.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from depthroute import ops
from depthroute.ops import reference

Results = dict[str, Tensor]
FP32_UNITS = 16 * 2.0**-24  # u - delta cancels, so fp32 results differ by more than one


def assert_within_budget(exact: Results, native: Results, kernel: Results) -> None:
    assert exact.keys() == native.keys() == kernel.keys()
    over = []
    for name, truth in exact.items():
        assert kernel[name].shape == truth.shape, name
        assert kernel[name].isfinite().all(), f"{name} has values that are not finite"
        allowed = 2 * _distance(native[name], truth) + FP32_UNITS * float(truth.norm()) + 1e-12
        found = _distance(kernel[name], truth)
        if not found <= allowed:
            over.append(f"{name}: {found:.3e} of {allowed:.3e} allowed")
    assert not over, "over the error budget: " + "; ".join(over)


def _distance(x: Tensor, truth: Tensor) -> float:
    return float((x.detach().to(truth.dtype) - truth).norm())


def leaves(tensors: Sequence[Tensor], dtype: torch.dtype | None) -> list[Tensor]:
    return [t.detach().to(dtype or t.dtype).requires_grad_() for t in tensors]


def with_gradients(
    function: Callable[..., Sequence[Tensor]],
    inputs: dict[str, Tensor],
    grads: Sequence[Tensor | None],
    dtype: torch.dtype | None = None,
) -> Results:
    """Outputs and gradients by name; ``dtype`` recomputes everything at that precision."""
    held = dict(zip(inputs, leaves(list(inputs.values()), dtype), strict=True))
    outputs = function(**held)
    pairs = zip(outputs, grads, strict=True)
    used = [(o, g.to(o.dtype)) for o, g in pairs if g is not None and o.requires_grad]
    torch.autograd.backward([o for o, _ in used], [g for _, g in used])
    results = {f"output {i}": o.detach() for i, o in enumerate(outputs)}
    for name, tensor in held.items():
        grad = tensor.grad if tensor.grad is not None else torch.zeros_like(tensor)
        results[f"gradient of {name}"] = grad
    return results


def held_to_budget(
    call: Callable[..., Sequence[Tensor]],
    inputs: dict[str, Tensor],
    grads: Sequence[Tensor | None],
    backend: str,
) -> tuple[Results, Counter[tuple[str, str]]]:
    """What ``call(backend)`` gives, beside ``call(None)``, the definition; and what ran for it."""
    exact = with_gradients(partial(call, None), inputs, grads, torch.float64)
    native = with_gradients(partial(call, None), inputs, grads)
    with ops.record_backends() as ran:
        kernel = with_gradients(partial(call, backend), inputs, grads)
    assert_within_budget(exact, native, kernel)
    return kernel, ran


@dataclass(frozen=True)
class MixCase:
    sources: int
    tokens: int
    width: int
    heads: int = 1
    dtype: torch.dtype = torch.bfloat16
    residual: bool = False
    norm: bool = False
    prior: bool = False
    head_norm: str = "full"
    centered: bool = False
    adds_sources: bool = False
    scale: float = 1.0
    eps: float = 1e-6
    contiguous: bool = True

    def inputs(self, device: str) -> dict[str, Tensor]:
        shape = (self.tokens, self.width)
        made: dict[str, Tensor] = {}
        for n in range(self.sources):
            spread = torch.randn((), device=device).exp()
            wide = torch.randn(self.tokens, 2 * self.width, device=device) * spread
            source = wide.to(self.dtype)
            source = source[:, : self.width] if n % 2 else source[:, self.width :]
            made[f"source {n}"] = source.contiguous() if self.contiguous else source
        made["query"] = torch.randn(self.width, device=device) / self.width**0.5 * 2
        made["key weight"] = torch.rand(self.width, device=device) + 0.5
        if self.residual:
            made["residual"] = torch.randn(shape, device=device).to(self.dtype) * 4
        if self.norm:
            made["norm weight"] = torch.rand(self.width, device=device) + 0.5
        if self.prior:
            made["prior"] = torch.randn(shape, device=device)
            made["prior lse"] = torch.randn(self.tokens, self.heads, device=device) + 1
        return made

    def call(self, backend: str | None, **given: Tensor) -> tuple[Tensor, ...]:
        sources = [given[f"source {n}"] for n in range(self.sources)]
        query, gain, residual = given["query"], given["key weight"], given.get("residual")
        weight = given.get("norm weight")
        options: dict = {"heads": self.heads, "head_norm": self.head_norm, "scale": self.scale}
        options["eps"] = self.eps
        if not self.prior:
            options |= {"centered": self.centered, "adds_sources": self.adds_sources}
        else:
            dtype = self.dtype if given["query"].dtype != torch.float64 else torch.float64
            options["dtype"] = dtype
        first = (given["prior"], given["prior lse"]) if self.prior else ()
        if backend is None:
            function = reference.depth_mix_merge if self.prior else reference.depth_mix
            x = function(*first, sources, query, gain, residual=residual, **options)
            return (x,) if weight is None else (x, reference.rms_norm(x, weight))
        function = ops.depth_mix_merge if self.prior else ops.depth_mix
        options.update(residual=residual, backend=backend, norm_weight=weight)
        x = function(*first, sources, query, gain, **options)
        return (x,) if weight is None else x

    def check(self, device: str) -> None:
        torch.manual_seed(0)
        inputs = self.inputs(device)
        shape = (self.tokens, self.width)
        grads = [torch.randn(shape, device=device).to(self.dtype) for _ in range(1 + self.norm)]
        _, ran = held_to_budget(self.call, inputs, grads, "triton")
        assert ran == {("depth_mix", "triton"): 1, ("depth_mix_backward", "triton"): 1}


@dataclass(frozen=True)
class BoundaryCase:
    """Everything between two sublayers; gradients also arrive at the state, the block's sum and
    the sources that are handed on, as they do in a model."""

    sources: int
    """Finished ones, the block's sum not counted."""
    tokens: int
    width: int
    heads: int = 1
    dtype: torch.dtype = torch.bfloat16
    state: bool = True
    partial: bool = True
    reads_last: bool = True
    norm: bool = True
    prior: bool = False
    scale: float = 1.0
    adds_sources: bool = False
    returns_last: bool = True
    gains: bool = False
    """Whether the norm's are of any size and sign, some of them zero."""

    def inputs(self, device: str) -> dict[str, Tensor]:
        def draw() -> Tensor:
            return torch.randn(self.tokens, self.width, device=device).to(self.dtype)

        made = {f"source {n}": draw() for n in range(self.sources)} | {"output": draw()}
        made |= {"state": 3 * draw()} if self.state else {}
        made |= {"partial": draw()} if self.partial else {}
        made["query"] = torch.randn(self.width, device=device) / self.width**0.5 * 2
        made["key weight"] = torch.rand(self.width, device=device) + 0.5
        if self.norm:
            made["norm weight"] = torch.rand(self.width, device=device) + 0.5
        if self.gains:
            weight = 10 ** (4 * torch.rand(self.width, device=device) - 3)
            weight[::3] *= -1
            for start, gain in enumerate((0.0, -0.0, 1e-30, -1e-12)):
                weight[start::17] = gain
            made["norm weight"] = weight
        if self.prior:
            made["prior"] = draw()
            made["prior lse"] = torch.randn(self.tokens, self.heads, device=device) + 1
        return made

    def call(
        self, backend: str | None, *, returns_x: bool = True, **given: Tensor
    ) -> tuple[Tensor, ...]:
        sources = [given[f"source {n}"] for n in range(self.sources)]
        output, state, partial = given["output"], given.get("state"), given.get("partial")
        query, gain, weight = given["query"], given["key weight"], given.get("norm weight")
        prior = {"prior": given["prior"], "prior_lse": given["prior lse"]} if self.prior else {}
        dtype = torch.float64 if query.dtype == torch.float64 else self.dtype
        if backend is not None:
            done = ops.depth_boundary(
                output, sources, query, gain, state, partial, heads=self.heads, backend=backend,
                reads_last=self.reads_last, norm_weight=weight, scale=self.scale, dtype=dtype,
                adds_sources=self.adds_sources, returns_last=self.returns_last,
                returns_x=returns_x, **prior,
            )  # fmt: skip
            assert (done.x is not None) == (returns_x or not self.norm)
            shown = done.y if self.norm else done.x
            kept = [t for t in (done.state if self.state else None, done.last) if t is not None]
            return shown, *kept, *done.sources
        state = None if state is None else state + output
        last = output if partial is None else partial + output
        read = [*sources, last] if self.reads_last else sources
        options: dict = {"residual": state, "heads": self.heads, "scale": self.scale}
        if self.prior:
            x = reference.depth_mix_merge(
                *prior.values(), read, query, gain, dtype=dtype, **options
            )
        else:
            options["adds_sources"] = self.adds_sources
            x = reference.depth_mix(read, query, gain, **options)
        shown = x if weight is None else reference.rms_norm(x, weight)
        kept = [t for t in (state, last if self.returns_last else None) if t is not None]
        return shown, *kept, *sources

    def check(self, device: str) -> None:
        torch.manual_seed(0)
        inputs = self.inputs(device)
        count = 1 + self.returns_last + self.state + self.sources
        shape = (self.tokens, self.width)
        grads = [torch.randn(shape, device=device).to(self.dtype) for _ in range(count)]
        for returns_x in (True, False):  # x kept for the norm's gradient, or mixed again
            call = partial(self.call, returns_x=returns_x)
            _, ran = held_to_budget(call, inputs, grads, "triton")
            assert ran == {("depth_mix", "triton"): 1, ("depth_mix_backward", "triton"): 1}


@dataclass(frozen=True)
class GroupCase:
    sources: int
    queries: int
    tokens: int
    width: int
    heads: int = 1
    dtype: torch.dtype = torch.bfloat16
    head_norm: str = "full"
    output_dtype: torch.dtype = torch.float32
    carried: bool = False

    def inputs(self, device: str) -> dict[str, Tensor]:
        made = {
            f"source {n}": torch.randn(self.tokens, self.width, device=device).to(self.dtype)
            for n in range(self.sources)
        }
        shape = (self.queries, self.width)
        made["queries"] = torch.randn(shape, device=device) / self.width**0.5 * 2
        made["key weights"] = torch.rand(shape, device=device) + 0.5
        return made

    def call(self, backend: str | None, **given: Tensor) -> tuple[Tensor, ...]:
        sources = [given[f"source {n}"] for n in range(self.sources)]
        arguments = sources, given["queries"], given["key weights"]
        options: dict = {"heads": self.heads, "head_norm": self.head_norm}
        handed = sources if self.carried else []
        if backend is None:
            outputs, lse = reference.depth_mix_group(*arguments, **options)
            if outputs.dtype == torch.float32:
                outputs = outputs.to(self.output_dtype)
            return outputs, lse, *handed
        options |= {"backend": backend, "dtype": self.output_dtype}
        if self.carried:
            outputs, lse, handed = ops.depth_mix_group_carried(*arguments, **options)
            return torch.stack(outputs), lse, *handed
        return ops.depth_mix_group(*arguments, **options)

    def check(self, device: str) -> None:
        torch.manual_seed(0)
        inputs = self.inputs(device)
        grads = [
            torch.randn(self.queries, self.tokens, last, device=device).to(dtype)
            for last, dtype in ((self.width, self.output_dtype), (self.heads, torch.float32))
        ]
        if self.carried:
            shape = self.tokens, self.width
            grads += [torch.randn(shape, device=device).to(self.dtype) for _ in range(self.sources)]
        _, ran = held_to_budget(self.call, inputs, grads, "triton")
        assert set(ran) == {("depth_mix_group", "triton"), ("depth_mix_group_backward", "triton")}


@dataclass(frozen=True)
class AttentionCase:
    layers: int
    batch: int
    tokens: int
    query_heads: int
    heads: int
    width: int
    value_width: int | None = None
    dtype: torch.dtype = torch.bfloat16
    transposed: bool = True
    strided_rows: bool = False
    kept: tuple[int, ...] | None = None
    """Layers that are handed on, with query and key; None hands nothing on."""
    missing: int = 0
    """One of so many gradients of what is handed on does not come."""

    def inputs(self, device: str) -> dict[str, Tensor]:
        def draw(heads: int, width: int) -> Tensor:
            x = torch.randn(self.batch, self.tokens, heads, width, device=device).to(self.dtype)
            if self.strided_rows:  # the elements of a row are not neighbours
                return x.permute(0, 2, 3, 1).contiguous().transpose(2, 3)
            return x.transpose(1, 2) if self.transposed else x.transpose(1, 2).contiguous()

        made = {"query": draw(self.query_heads, self.width)}
        for n in range(self.layers):
            made[f"key {n}"] = draw(self.heads, self.width)
            made[f"value {n}"] = draw(self.heads, self.value_width or self.width)
        return made

    def call(self, backend: str | None, **given: Tensor) -> tuple[Tensor, ...]:
        keys = [given[f"key {n}"] for n in range(self.layers)]
        values = [given[f"value {n}"] for n in range(self.layers)]
        function = ops.depth_attention_mix if backend else reference.depth_attention_mix
        options = {"backend": backend} if backend else {}
        return function(given["query"], keys, values, return_weights=True, **options)

    def read(self, backend: str | None, **given: Tensor) -> list[Tensor]:
        """All that is read from here on: the mixed value and, if any is, what is handed on."""
        if self.kept is None:
            return [self.call(backend, **given)[0]]
        keys = [given[f"key {n}"] for n in range(self.layers)]
        values = [given[f"value {n}"] for n in range(self.layers)]
        if backend is None:
            mixed = reference.depth_attention_mix(given["query"], keys, values)
            made = ops.CarriedAttention(
                mixed, given["query"], keys[-1], keys, [*values[:-1], mixed]
            )
        else:
            kept = [n in self.kept for n in range(self.layers)]
            made = ops.depth_attention_carried(given["query"], keys, values, kept, backend)
        later = [t for n in self.kept for t in (made.keys[n], made.values[n])]
        return [made.mixed, made.query, made.key, *later]

    def arriving(self, outputs: Sequence[Tensor]) -> list[Tensor | None]:
        """Gradients in turn in the order of heads, of tokens, of nothing, and not at all."""
        made: list[Tensor | None] = []
        for n, output in enumerate(outputs):
            grad = torch.randn(output.shape, device=output.device).to(self.dtype)
            if n % 3 == 1:
                grad = grad.transpose(1, 2).contiguous().transpose(1, 2)
            elif n % 3 == 2:
                grad = grad.transpose(2, 3).contiguous().transpose(2, 3)
            is_there = n == 0 or not self.missing or n % self.missing
            made.append(grad if is_there else None)
        return made

    def check(self, device: str) -> None:
        torch.manual_seed(0)
        inputs = self.inputs(device)
        grads = self.arriving(self.read(None, **inputs))
        _, ran = held_to_budget(self.read, inputs, grads, "triton")
        name = "depth_attention_mix"
        assert ran == {(name, "triton"): 1, (f"{name}_backward", "triton"): 1}
        with torch.no_grad():
            expected, found = self.call(None, **inputs)[1], self.call("triton", **inputs)[1]
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@dataclass(frozen=True)
class LossCase:
    """Hidden states and a head; every third target is ignored."""

    tokens: int
    vocabulary: int
    width: int = 16
    dtype: torch.dtype = torch.bfloat16
    bias: bool = False
    scale: float = 1.0
    softcap: float | None = None
    chunk: int | None = None
    all_ignored: bool = False

    def inputs(self, device: str) -> dict[str, Tensor]:
        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, device=device).to(self.dtype)

        made = {"hidden": 3 * draw(self.tokens, self.width)}
        made["weight"] = draw(self.vocabulary, self.width)
        return made | ({"bias": draw(self.vocabulary)} if self.bias else {})

    def targets(self, device: str) -> Tensor:
        targets = torch.arange(self.tokens, device=device) * 7919 % self.vocabulary
        targets[:: 1 if self.all_ignored else 3] = -100
        return targets

    def call(self, backend: str | None, **given: Tensor) -> tuple[Tensor, ...]:
        options: dict = {"scale": self.scale, "softcap": self.softcap}
        function = reference.linear_cross_entropy
        if backend is not None:
            function = ops.linear_cross_entropy
            options |= {"backend": backend, "chunk": self.chunk}
        hidden, weight = given["hidden"], given["weight"]
        targets = self.targets(hidden.device.type)
        return (function(hidden, weight, targets, given.get("bias"), **options),)

    def check(self, device: str, backend: str = "triton") -> None:
        torch.manual_seed(0)
        inputs, grads = self.inputs(device), [torch.tensor(1 / 3, device=device)]
        kernel, ran = held_to_budget(self.call, inputs, grads, backend)
        assert ran == {("linear_cross_entropy", backend): 1}
        with torch.no_grad():
            (alone,) = self.call(backend, **inputs)
        torch.testing.assert_close(alone, kernel["output 0"], rtol=1e-6, atol=0.0)


@dataclass(frozen=True)
class StaticCase:
    """Sources whose weights are the same for all tokens, some handed on and used again."""

    sources: int
    tokens: int
    width: int
    dtype: torch.dtype = torch.bfloat16
    residual: bool = False
    offset: int = 0
    scale: float = 1.0
    carried: bool = False
    contiguous: bool = True

    def inputs(self, device: str) -> dict[str, Tensor]:
        shape = self.tokens, self.width
        names = [f"source{n}" for n in range(self.sources)]
        names += ["residual"] if self.residual else []
        made = {n: torch.randn(*shape, device=device).to(self.dtype) for n in names}
        if not self.contiguous:
            made["source0"] = made["source0"].t().contiguous().t()
        return made | {"logits": torch.randn(self.sources, device=device)}

    def call(self, backend: str | None, **given: Tensor) -> tuple[Tensor, ...]:
        sources = [given[f"source{n}"] for n in range(self.sources)]
        options: dict = {"centered": self.offset < 0, "adds_sources": self.offset > 0}
        options |= {"scale": self.scale, "residual": given.get("residual")}
        if backend is None:
            x, handed = reference.static_mix(sources, given["logits"], **options), sources
        else:
            options |= {"backend": backend, "hands_on": self.carried}
            x, handed = ops.static_mix_carried(sources, given["logits"], **options)
        return x, *(handed[1:] if self.carried else ())

    def check(self, device: str, backend: str = "triton") -> None:
        torch.manual_seed(0)
        inputs = self.inputs(device)
        shape = self.tokens, self.width
        num_outputs = self.sources if self.carried else 1
        grads = [torch.randn(*shape, device=device).to(self.dtype) for _ in range(num_outputs)]
        _, ran = held_to_budget(self.call, inputs, grads, backend)
        assert {name for _, name in ran} == {backend}


@dataclass(frozen=True)
class SinkhornCase:
    """Matrices of ``streams`` rows that are made doubly stochastic."""

    tokens: int
    streams: int = 4
    scale: float = 1.0
    """Of the logits."""

    def inputs(self, device: str) -> dict[str, Tensor]:
        size = self.tokens, self.streams, self.streams
        return {"logits": self.scale * torch.randn(size, device=device)}

    def call(self, backend: str | None, **given: Tensor) -> tuple[Tensor, ...]:
        if backend is None:
            return (reference.doubly_stochastic(given["logits"]),)
        return (ops.doubly_stochastic(given["logits"], backend),)

    def check(self, device: str, backend: str = "triton") -> None:
        torch.manual_seed(0)
        inputs = self.inputs(device)
        grads = [torch.randn_like(inputs["logits"])]
        _, ran = held_to_budget(self.call, inputs, grads, backend)
        assert {name for _, name in ran} == {backend}
