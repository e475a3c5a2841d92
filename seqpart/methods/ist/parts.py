"""The joint chain: the whole network's blocks, followed by those of its parts, and how the parts are cut out of the whole.

    blocks        0 .. B-1    B .. 2B-1    2B .. 3B-1   ...
                  the whole   part 0       part 1

A part's block is the whole's with fewer units of its hidden layers. In a section of residual blocks that is divided block by
block, it is any block of that section, or nothing. It has a home of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise

from torch import nn

from seqpart.errors import ModelError, OptionError
from seqpart.methods.ist.hidden import HiddenLayer, hidden_layers
from seqpart.methods.ist.narrow import NEURONS, Cut, Ints, cuts_of, groups_of, index_sets, narrowed, template, widths
from seqpart.methods.ist.residual import Section, scaled, section_of
from seqpart.methods.ist.statistics import observes
from seqpart.model.blocks import MOST_BLOCKS, Block, Chain, Factory
from seqpart.model.inspection import has_hooks


class PartBlock(Block):
    """A block of the joint chain: the share of `part` in the whole network's block `origin`."""

    def __init__(
        self, part: int, origin: Block, source: Factory, whole: Chain, like: object, *, is_cut_out: bool = False
    ) -> None:
        """like: equal for blocks of parts with equally many units. is_cut_out: true if its module returns a tuple."""
        blocks = len(whole)
        super().__init__(blocks * (1 + part) + origin.number, origin.name, source)
        self.part, self.origin, self.is_cut_out = part, origin, is_cut_out
        first = (part + 1) * _values(whole)
        self.takes, self.gives = (tuple(first + number for number in numbers) for numbers in (origin.takes, origin.gives))
        self.draws_as = part * blocks + origin.number  # a single part draws the same random numbers as the whole
        self.same_as = like

    def __str__(self) -> str:
        return f"block {self.origin.number} ({self.kind}) of subnet {self.part}"

    @property
    def kind(self) -> str:
        return self.origin.kind

    def exported(self, name: str) -> str:
        """Returns a placeholder: only the whole network's blocks are exported."""
        return f"{self.name}.{name}"


def _values(whole: Chain) -> int:
    """Returns the number of values between the chain's blocks, its input included."""
    return 1 + max(number for block in whole for number in block.gives)


@dataclass(frozen=True, eq=False)
class Parts:
    """How `count` parts are cut out of a chain of `blocks` blocks, anew in each round."""

    count: int
    blocks: int
    group: int
    seed: int
    layers: tuple[HiddenLayer, ...]
    cuts: tuple[dict[str, Cut], ...]
    """The cut tensors of each block, by name."""
    batch_norms: frozenset[int]
    """Blocks with BatchNorm running statistics, which are out of date in the whole network while its parts are trained."""
    section: Section | None = None
    """Residual blocks that are divided as whole blocks."""

    def units(self, round_: int) -> list[list[Ints]]:
        """Returns the units of each hidden layer in that round, by part."""
        return _drawn(self, round_)

    def block_of(self, part: int, block: int) -> int:
        """Returns the number in the joint chain of the share of `part` in the whole network's `block`."""
        return self.blocks * (1 + part) + block

    def holders(self, block: int, round_: int) -> dict[int, int]:
        """Returns {part with a share of the whole network's `block` in that round: the share's number in the joint chain}."""
        if self.is_dealt(block):
            assert self.section is not None
            part, place = self.section.dealt(self.seed, round_, self.count)[block]
            return {part: self.block_of(part, place)}
        return {part: self.block_of(part, block) for part in range(self.count)}

    def vacant(self, block: int) -> list[int]:
        """Returns the numbers in the joint chain of parts' blocks in the place of `block` that are empty in every round."""
        return [self.block_of(part, block) for part in range(self.count) if not self.has_place(part, block)]

    def is_dealt(self, block: int) -> bool:
        return self.count > 1 and self.section is not None and block in self.section.blocks

    def has_place(self, part: int, block: int) -> bool:
        if not self.is_dealt(block):
            return True
        assert self.section is not None
        return self.section.blocks.index(block) < self.section.depth(part, self.count)

    def numbers(self, block: int) -> dict[str, int]:
        """Returns {name of a tensor with a part's unit numbers: the hidden layer} for one block."""
        placed = ((layer.number, spot) for layer in self.layers if layer.placed for spot in layer.rows)
        return {
            f"{spot.side.path}.{NEURONS}" if spot.side.path else NEURONS: number
            for number, spot in placed
            if spot.block == block and self.count > 1
        }

    @property
    def notes(self) -> list[str]:
        """Describes how hidden layers are divided, equal ones once."""
        found: dict[str, int] = {}
        for layer in self.layers:
            each = groups_of(layer.units, self.count, self._group_of(layer))
            size = layer.units // each
            what = "heads" if layer.alone else "neurons" if size == 1 else f"groups of {size} neurons"
            text = f"{layer.units if size == 1 else each} {what}"
            found[text] = found.get(text, 0) + 1
        layers = ", ".join(f"{count} of {text}" for text, count in found.items())
        words = [f"hidden layers divided among them: {layers}"] if layers else []
        if self.section is not None and self.count > 1:
            first, *_, last = self.section.blocks
            words.append(f"residual blocks {first}..{last} dealt out among them, {len(self.section.blocks)} in all")
        whole = [b for b in range(self.blocks) if not self.cuts[b] and not self.is_dealt(b)]
        if whole:
            words.append(f"blocks {', '.join(map(str, whole[:8]))}{', ...' if len(whole) > 8 else ''} whole in each")
        return [f"{self.count} subnet(s), {'; '.join(words)}"]

    def _group_of(self, layer: HiddenLayer) -> int:
        return 1 if layer.alone else self.group

    def _draw(self, round_: int) -> list[list[Ints]]:
        by_layer = [
            index_sets(self.seed, round_, layer.number, layer.units, self.count, self._group_of(layer)) for layer in self.layers
        ]
        return [[sets[part] for sets in by_layer] for part in range(self.count)]

    def widths_of(self, part: int) -> tuple[int, ...]:
        """Returns the number of units that `part` has in each hidden layer."""
        return tuple(widths(layer.units, self.count, self._group_of(layer))[part] for layer in self.layers)


@lru_cache(2)
def _drawn(parts: Parts, round_: int) -> list[list[Ints]]:
    return parts._draw(round_)


class JointChain(Chain):
    """The whole network's blocks and those of its parts."""

    def __init__(self, whole: Chain, blocks: Sequence[PartBlock], parts: Parts) -> None:
        learn, values = whole.differentiable, _values(whole)
        super().__init__(
            [*whole, *blocks], begins=tuple(range(0, len(whole) + len(blocks), len(whole))), aliases=whole.aliases,
            differentiable=learn and frozenset(n + part * values for n in learn for part in range(parts.count + 1)),
        )  # fmt: skip
        self.parts, self.reads = parts, whole.reads


def parted(chain: Chain, *, count: int, group: int, seed: int) -> JointChain:
    """Returns the joint chain of `chain` and its parts. Raises ModelError or OptionError if it cannot be divided."""
    _refuse_whole(chain, count)
    whole = [template(block) for block in chain]
    layers = tuple(hidden_layers(whole))
    divided = frozenset(spot.block for layer in layers for spot in (*layer.rows, *layer.columns))
    section = section_of(whole, divided, len(layers))
    _refuse_undivided(chain, layers, section, count)
    cuts = tuple(cuts_of(whole, layers))
    norms = frozenset(number for number, module in enumerate(whole) if any(map(observes, module.modules())))
    parts = Parts(count, len(chain), group, seed, layers, cuts, norms, section)
    blocks = [_part_block(chain, parts, part, block, whole[block.number]) for part in range(count) for block in chain]
    return JointChain(chain, blocks, parts)


def _part_block(chain: Chain, parts: Parts, part: int, block: Block, module: nn.Module) -> PartBlock:
    """Returns the share of `part` in the whole network's `block`. module: that block's module on the meta device."""
    if not parts.has_place(part, block.number):
        return PartBlock(part, block, nn.Identity, chain, nn.Identity)
    own, units = parts.cuts[block.number], parts.widths_of(part)
    # Blocks that are equal in the whole network are equal in all parts of one width.
    like = (block.same_as, units, tuple(own.items()), parts.count)
    source = partial(narrowed, module, block.number, parts.layers, own, units, parts.count)
    if parts.is_dealt(block.number):
        assert parts.section is not None
        source = partial(scaled, source, parts.section.branch, parts.count)
    return PartBlock(part, block, source, chain, like, is_cut_out=block.is_cut_out)


def _refuse_whole(chain: Chain, count: int) -> None:
    if chain.tile:
        raise ModelError("method ist cuts layers itself, and takes none that are in tiles: leave out --tile.")
    for block, following in pairwise(chain):
        if len(block.gives) != 1 or following.takes != block.gives:
            raise ModelError(
                "method ist needs each block to pass one tensor to the next, and none past it (no skip connection between "
                f"blocks); between {block} and {following} there are more. Give the model as a list of blocks, or use --method "
                "auto."
            )
    tied = [str(block) for block in chain if block.tied]
    if tied:
        raise ModelError(
            f"method ist cuts each block's weights alone, so blocks must not share a parameter, as {tied[0]} does with an "
            "earlier one. Use --method auto."
        )
    hooked = [str(block) for block in chain if block.alive is not None and any(map(has_hooks, block.alive.parameters()))]
    if hooked:
        raise ModelError(f"method ist trains copies of blocks, which lack the hooks of {hooked[0]}'s parameters. Remove these.")
    if (count + 1) * len(chain) > MOST_BLOCKS:
        raise OptionError(
            f"--subnets {count}: the model's {len(chain)} blocks and those of {count} subnets are more than {MOST_BLOCKS}. "
            f"Give at most {MOST_BLOCKS // len(chain) - 1}, or join blocks with nn.Sequential."
        )


def _refuse_undivided(chain: Chain, layers: Sequence[HiddenLayer], section: Section | None, count: int) -> None:
    if not layers and section is None:
        found = [*map(str, chain[:12]), *(["..."] if len(chain) > 12 else [])]
        raise ModelError(
            "method ist found no hidden layer to divide: it looks for nn.Linear, a normalisation and elementwise activations, "
            "and nn.Linear again, for modules that have hidden_layers(), and for two or more residual blocks that are alike, "
            f"of torchvision, timm or with residual_branch(); found {', '.join(found)}. What the forward of a model "
            "does between its layers is not looked through: let it be modules (nn.ReLU and not F.relu). Or use --method auto."
        )
    if section is not None and len(section.blocks) < count:
        raise OptionError(
            f"--subnets {count}: the longest row of residual blocks that are alike, {chain[section.blocks[0]]} to "
            f"{chain[section.blocks[-1]]}, has {len(section.blocks)}, and each subnet needs one. Give at most "
            f"{len(section.blocks)}."
        )
    narrowest = min(layers, key=lambda layer: layer.units, default=None)
    if narrowest is not None and narrowest.units < count:
        block = chain[narrowest.rows[0].block]
        what = "heads" if narrowest.alone else "neurons"
        raise OptionError(
            f"--subnets {count}: {block} has a hidden layer of {narrowest.units} {what}, and each subnet needs one. Give at "
            f"most {narrowest.units}."
        )
