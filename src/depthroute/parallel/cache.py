"""What a rank of a pipeline keeps of a micro-batch between its chunks, and whose gradient it is.

Forward: a stage is handed what its rank lacks and takes the rest from here. What it receives or
makes and a later stage of the rank will want is put here; all of it goes when the rank's last stage
has run. Backward: each stage that took a block *deposits* the block's gradient, and the stage that
put it there *collects* the sum with its own gradient of the block. A stage runs backward only after
every later one, so all deposits are there by then; one that is missing is an error.

Nothing is sent from inside autograd: both happen in the backward of the two functions that stand at
a stage's beginning and end, which every way of running a stage backward passes exactly once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from depthroute.errors import DepthrouteError
from depthroute.parallel.layout import Stage


@dataclass
class Account:
    """Of one block of one micro-batch."""

    due: int = 0
    deposits: int = 0
    total: Tensor | None = None


class BlockCache:
    """Of one rank."""

    def __init__(self) -> None:
        self.micro_batch: int | None = None
        """The one that is being run; None while torch tries the shapes."""
        self._blocks: dict[int | None, dict[str, Tensor]] = {}
        self._accounts: dict[tuple[int, str], Account] = {}
        self.most_blocks = 0
        """The most that were ever held at once."""

    def __len__(self) -> int:
        """Blocks and gradients that are held now."""
        return sum(map(len, self._blocks.values())) + len(self._accounts)

    @contextmanager
    def running(self, micro_batch: int) -> Iterator[None]:
        self.micro_batch = micro_batch
        try:
            yield
        finally:
            self.micro_batch = None

    def clear(self) -> None:
        """Forget what a step that failed has left."""
        self._blocks.clear()
        self._accounts.clear()

    def entered(self, stage: Stage, received: Sequence[Tensor]) -> list[Tensor]:
        """Everything the stage starts with: what it ``received``, and what is held here."""
        assert stage.before is not None
        named = dict(zip(stage.before.sent, received, strict=True))
        self._keep(stage, named)
        lent = {name: self._lent(name) for name in stage.before.lent}
        if stage.is_last_of_rank:
            self._blocks.pop(self.micro_batch, None)
        return list(self._crossed(stage.before.held, named | lent, stage.keeps, frozenset(lent)))

    def left(self, stage: Stage, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """What the stage hands over of the ``tensors`` that it ends with."""
        assert stage.after is not None
        named = dict(zip(stage.after.held, tensors, strict=True))
        before = () if stage.before is None else stage.before.held
        dense = {name: named[name].contiguous() for name in stage.after.sent}
        made = {name: tensor for name, tensor in dense.items() if name not in before}
        self._keep(stage, made)
        return self._crossed(stage.after.sent, dense, stage.keeps & made.keys())

    def _crossed(
        self,
        names: tuple[str, ...],
        named: dict[str, Tensor],
        collects: frozenset[str],
        deposits: frozenset[str] = frozenset(),
    ) -> tuple[Tensor, ...]:
        if self.micro_batch is None:
            collects = deposits = frozenset()
        tensors = (named[name] for name in names)
        return _Crossing.apply(self, self.micro_batch, names, collects, deposits, *tensors)

    def _keep(self, stage: Stage, named: dict[str, Tensor]) -> None:
        for name in stage.keeps & named.keys():
            blocks = self._blocks.setdefault(self.micro_batch, {})
            assert name not in blocks, f"{name} is held twice"
            needs_grad = named[name].requires_grad and torch.is_grad_enabled()
            blocks[name] = named[name].detach().requires_grad_(needs_grad)
            if needs_grad and self.micro_batch is not None:
                self._accounts[self.micro_batch, name] = Account()
        self.most_blocks = max(self.most_blocks, sum(map(len, self._blocks.values())))

    def _lent(self, name: str) -> Tensor:
        block = self._blocks.get(self.micro_batch, {}).get(name)
        if block is None:
            raise DepthrouteError(
                f"{name} of micro-batch {self.micro_batch} was not sent to this rank and is not "
                "held on it; every stage of a micro-batch must run once and in order"
            )
        if block.requires_grad and self.micro_batch is not None:
            self._accounts[self.micro_batch, name].due += 1
        return block.detach().requires_grad_(block.requires_grad)

    def deposit(self, micro_batch: int, name: str, gradient: Tensor) -> None:
        account = self._accounts[micro_batch, name]
        account.deposits += 1
        account.total = gradient if account.total is None else account.total + gradient

    def collected(self, micro_batch: int, name: str, gradient: Tensor) -> Tensor:
        """``gradient`` with all that was deposited."""
        account = self._accounts.pop((micro_batch, name))
        if account.deposits != account.due:
            raise DepthrouteError(
                f"{account.deposits} of {account.due} gradients of {name} have come back for "
                f"micro-batch {micro_batch}; a later stage of this rank has not run backward"
            )
        return gradient if account.total is None else gradient + account.total

    def check_settled(self) -> None:
        """After a step nothing is held: no block and no gradient that nobody has collected."""
        if len(self):
            left = sorted({name for blocks in self._blocks.values() for name in blocks})
            left += sorted({name for _, name in self._accounts})
            raise DepthrouteError(f"the step has left {', '.join(left)} in the pipeline's cache")


class _Crossing(torch.autograd.Function):
    """The tensors as they are; in backward, gradients are deposited and collected.

    One node for all of them: it runs as soon as one of them is reached, so a block that a stage
    only passes by has a gradient too, of zeros.
    """

    @staticmethod
    def forward(
        ctx: Any,
        cache: BlockCache,
        micro_batch: int,
        names: tuple[str, ...],
        collects: frozenset[str],
        deposits: frozenset[str],
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.ledger = cache, micro_batch, names, collects, deposits
        # no views of the inputs, which zero-bubble schedules could not detach in place
        outputs = tuple(tensor.detach() for tensor in tensors)
        frozen = (o for o, t in zip(outputs, tensors, strict=True) if not t.requires_grad)
        ctx.mark_non_differentiable(*frozen)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        cache, micro_batch, names, collects, deposits = ctx.ledger
        results: list[Tensor | None] = []
        for name, gradient, needed in zip(names, gradients, ctx.needs_input_grad[5:], strict=True):
            result = None
            if needed and name in deposits:
                cache.deposit(micro_batch, name, gradient)
            elif needed:
                total = (
                    cache.collected(micro_batch, name, gradient) if name in collects else gradient
                )
                result = total.contiguous()  # as the buffer that receives it is
            results.append(result)
        return (*[None] * 5, *results)
