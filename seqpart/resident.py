"""One partition on the device, with its optimizer.

    AT_HOME --load--> LOADING --> RESIDENT --drop--> SAVING --> AT_HOME

    who holds the weights:  the store   both       the slot       both     the store

The slot is one flat buffer, made once and used by every partition in turn; parameters and optimizer state are views
of it, so loading is a read into it and saving is a write out of it.
"""

import enum
from collections.abc import Sequence

import torch
from torch import nn

from seqpart.blocks import Block, attach, detach
from seqpart.costs import BlockCost
from seqpart.device import Device
from seqpart.layout import Layout
from seqpart.optimizers import Optimizer
from seqpart.store import Store


class Placement(enum.Enum):
    AT_HOME = "at home"
    LOADING = "loading"
    RESIDENT = "resident"
    SAVING = "saving"


def state_layouts(costs: Sequence[BlockCost], optimizer: Optimizer | None) -> list[Layout]:
    """Layout of every block's optimizer state; empty ones without an optimizer."""
    if optimizer is None:
        return [Layout(()) for _ in costs]
    return [
        optimizer.state_layout({spec.name: spec for spec in cost.layout.specs if spec.name in cost.trainable}) for cost in costs
    ]


def slot_bytes(costs: Sequence[BlockCost], optimizer: Optimizer | None) -> int:
    """Bytes of the slot for a partition of these blocks."""
    return sum(cost.layout.room for cost in costs) + sum(state.room for state in state_layouts(costs, optimizer))


class Resident:
    """Partition `number`: some blocks of the chain, moved in and out of a slot that the executor owns."""

    def __init__(
        self, number: int, blocks: Sequence[Block], costs: Sequence[BlockCost], store: Store, device: Device,
        *, optimizer: Optimizer, seed: int,
    ) -> None:  # fmt: skip
        self.number, self.blocks, self.placement = number, blocks, Placement.AT_HOME
        self._costs, self._store, self._device = costs, store, device
        self._choice, self._seed = optimizer, seed
        self._optimizer: torch.optim.Optimizer | None = None
        self._regions: list[torch.Tensor] = []
        self._state_regions: list[torch.Tensor] = []
        self._changed = False
        self._buffers_before: list[tuple[torch.Tensor, torch.Tensor]] = []

    @property
    def trainable(self) -> list[nn.Parameter]:
        return [p for block in self.blocks for p in block.husk.parameters() if p.requires_grad]

    def load(self, slot: torch.Tensor, *, to_train: bool) -> None:
        """Read the weights into `slot`, and the optimizer state (zero the first time) if it will update."""
        self.placement = Placement.LOADING
        states = state_layouts(self._costs, self._choice if to_train else None)
        layouts = [cost.layout for cost in self._costs] + states
        regions, offset = [], 0
        for layout in layouts:
            regions.append(slot[offset : offset + layout.room])
            offset += layout.room
        self._regions, self._state_regions = regions[: len(self.blocks)], regions[len(self.blocks) :]
        self._store.get_all((block.home, region) for block, region in zip(self.blocks, self._regions, strict=True))
        for block, cost, region in zip(self.blocks, self._costs, self._regions, strict=True):
            attach(block.husk, cost.layout.views(region))
        if to_train:
            self._load_optimizer(states)
        self.placement = Placement.RESIDENT

    def _load_optimizer(self, states: list[Layout]) -> None:
        at_home = [block.state_home in self._store for block in self.blocks]
        self._store.get_all(
            (block.state_home, region)
            for block, region, known in zip(self.blocks, self._state_regions, at_home, strict=True)
            if known
        )
        if not self.trainable:
            return
        self._optimizer = self._choice.build(self.trainable)
        for block, layout, region, known in zip(self.blocks, states, self._state_regions, at_home, strict=True):
            if not known:
                region.zero_()
            named = [(name, p) for name, p in block.husk.named_parameters() if p.requires_grad]
            self._choice.adopt(self._optimizer, named, layout.views(region))

    def forward(self, x: torch.Tensor, *, training: bool, key: tuple[int, ...]) -> torch.Tensor:
        """The partition's output for `x`; the random state of each block is a function of `key` and the block."""
        for block in self.blocks:
            module = block.husk
            module.train(training)
            self._device.seed(self._seed, *key, block.number)
            x = module(x)
        return x

    def begin_update(self) -> None:
        """Keep the buffers as they are: a forward pass changes running statistics, and it may have to be done again."""
        self._buffers_before = [(buffer, buffer.clone()) for block in self.blocks for buffer in block.husk.buffers()]

    def abandon_update(self) -> None:
        """Forget what the micro-batches of an unfinished update left: gradients and running statistics."""
        self.forget_gradients()
        for buffer, before in self._buffers_before:
            buffer.copy_(before)
        self._buffers_before = []

    def update(self, clip_grad_norm: float | None) -> float | None:
        """Optimizer step, then the gradients are freed. Returns the gradients' norm if it was needed for clipping."""
        norm = None
        if clip_grad_norm is not None:
            norm = float(nn.utils.clip_grad_norm_(self.trainable, clip_grad_norm))
        if self._optimizer is not None:
            self._optimizer.step()
        self._buffers_before = []
        self._changed = True  # buffers may have changed, also where nothing is trained
        self.forget_gradients()
        return norm

    def forget_gradients(self) -> None:
        for parameter in self.trainable:
            parameter.grad = None

    def drop(self, *, keep_state: bool) -> None:
        """Send the weights home if they changed, the optimizer state if `keep_state`, and let go of the slot."""
        self.placement = Placement.SAVING
        items = []
        if self._changed:
            self._gather_replaced()
            items = [(b.home, c.layout, r) for b, c, r in zip(self.blocks, self._costs, self._regions, strict=True)]
            if keep_state:
                states = state_layouts(self._costs, self._choice)
                items += [(b.state_home, s, r) for b, s, r in zip(self.blocks, states, self._state_regions, strict=True)]
        self._store.put_all(items)
        if not keep_state:  # an earlier visit's would be taken for this one's, and fills the disk
            for block in self.blocks:
                self._store.discard(block.state_home)
        self.release()

    def _gather_replaced(self) -> None:
        """A module may assign a new tensor to a name instead of writing into it: bring it back into the slot."""
        for block, cost, region in zip(self.blocks, self._costs, self._regions, strict=True):
            views = cost.layout.views(region)
            # Each name, also of a tensor that has two; and all values before any place, since they may lie in one another's.
            named = [*block.husk.named_parameters(), *block.husk.named_buffers(remove_duplicate=False)]
            moved = [
                (views[name], tensor.detach().clone())
                for name, tensor in named
                if name in views and tensor.data_ptr() != views[name].data_ptr()
            ]
            for view, value in moved:
                view.copy_(value)

    def release(self) -> None:
        """Hold nothing on the device any more, whatever happened before."""
        for block in self.blocks:
            detach(block.husk)
        self._optimizer = None
        self._buffers_before = []
        self._regions, self._state_regions = [], []
        self._changed = False
        self.placement = Placement.AT_HOME
