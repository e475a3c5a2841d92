"""The chain of the whole network with those of its parts behind it, and what says how the ones are cut out of the other.

    blocks        0 .. B-1    B .. 2B-1    2B .. 3B-1   ...
                  the whole   part 0       part 1

A part's block is the whole's with fewer units of its hidden layers, or in a section that is dealt out block by block any block
of that section, or nothing. It has a home of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise

from torch import nn

from seqpart.errors import ModelError, OptionError
from seqpart.methods.ist.hidden import HiddenLayer, hidden_layers
from seqpart.methods.ist.indices import Ints, groups_of, index_sets, widths
from seqpart.methods.ist.narrow import NEURONS, Cut, cuts_of, narrowed, template
from seqpart.methods.ist.residual import Section, absent, scaled, section_of
from seqpart.methods.ist.statistics import observes
from seqpart.model.blocks import MOST_BLOCKS, Block, Chain, Factory


class PartBlock(Block):
    """Block `number` of the joint chain: what `part` has of the whole's block `origin`."""

    def __init__(
        self, part: int, origin: Block, source: Factory, whole: Chain, like: object, *, is_cut_out: bool = False
    ) -> None:
        """like: equal for blocks of parts that have as many units. is_cut_out: whether its module returns a tuple."""
        blocks = len(whole)
        super().__init__(blocks * (1 + part) + origin.number, origin.name, source)
        self.part, self.origin, self.is_cut_out = part, origin, is_cut_out
        first = (part + 1) * _values(whole)
        self.takes, self.gives = (tuple(first + number for number in numbers) for numbers in (origin.takes, origin.gives))
        self.draws_as = part * blocks + origin.number  # those of the only part draw what the whole's would
        self._same = like

    def __str__(self) -> str:
        return f"block {self.origin.number} ({self.kind}) of subnet {self.part}"

    @property
    def kind(self) -> str:
        return self.origin.kind

    def exported(self, name: str) -> str:
        """Nobody writes it: only the whole's is."""
        return f"{self.name}.{name}"


def _values(whole: Chain) -> int:
    """How many values there are between its blocks, and in front of them."""
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
    """Of each block, what is cut, by the name of the tensor."""
    batch_norms: frozenset[int]
    """Blocks with running statistics of a BatchNorm, which the whole's are not while parts are trained."""
    section: Section | None = None
    """Residual blocks that are dealt out whole."""

    def units(self, round_: int) -> list[list[Ints]]:
        """Of each part, its units of each hidden layer in that round."""
        return _drawn(self, round_)

    def block_of(self, part: int, block: int) -> int:
        """Number in the joint chain of what `part` has of the whole's `block`."""
        return self.blocks * (1 + part) + block

    def holders(self, block: int, round_: int) -> dict[int, int]:
        """{part that has something of the whole's `block` in that round: number in the joint chain of what it has}."""
        if self.is_dealt(block):
            assert self.section is not None
            part, place = self.section.dealt(self.seed, round_, self.count)[block]
            return {part: self.block_of(part, place)}
        return {part: self.block_of(part, block) for part in range(self.count)}

    def vacant(self, block: int) -> list[int]:
        """Numbers in the joint chain of blocks of parts that stand in the place of `block` and are nothing, in every round."""
        return [self.block_of(part, block) for part in range(self.count) if not self.has_place(part, block)]

    def is_dealt(self, block: int) -> bool:
        return self.count > 1 and self.section is not None and block in self.section.blocks

    def has_place(self, part: int, block: int) -> bool:
        """Whether `part` has a block there at all."""
        if not self.is_dealt(block):
            return True
        assert self.section is not None
        return self.section.blocks.index(block) < self.section.depth(part, self.count)

    def numbers(self, block: int) -> dict[str, int]:
        """{tensor of a part's block that holds the numbers of its units: the hidden layer}."""
        placed = ((layer.number, spot) for layer in self.layers if layer.placed for spot in layer.rows)
        return {
            f"{spot.side.path}.{NEURONS}" if spot.side.path else NEURONS: number
            for number, spot in placed
            if spot.block == block and self.count > 1
        }

    @property
    def said(self) -> list[str]:
        """How hidden layers are divided, in words, those that are alike once."""
        found: dict[str, int] = {}
        for layer in self.layers:
            each = groups_of(layer.units, self.count, self._group_of(layer))
            size = layer.units // each
            what = "heads" if layer.alone else "neurons" if size == 1 else f"groups of {size} neurons"
            text = f"{layer.units if size == 1 else each} {what}"
            found[text] = found.get(text, 0) + 1
        layers = ", ".join(f"{count} of {text}" for text, count in found.items())
        said = [f"hidden layers divided among them: {layers}"] if layers else []
        if self.section is not None and self.count > 1:
            first, *_, last = self.section.blocks
            said.append(f"residual blocks {first}..{last} dealt out among them, {len(self.section.blocks)} in all")
        whole = [b for b in range(self.blocks) if not self.cuts[b] and not self.is_dealt(b)]
        if whole:
            said.append(f"blocks {', '.join(map(str, whole[:8]))}{', ...' if len(whole) > 8 else ''} whole in each")
        return [f"{self.count} subnet(s), {'; '.join(said)}"]

    def _group_of(self, layer: HiddenLayer) -> int:
        return 1 if layer.alone else self.group

    def _draw(self, round_: int) -> list[list[Ints]]:
        by_layer = [
            index_sets(self.seed, round_, layer.number, layer.units, self.count, self._group_of(layer)) for layer in self.layers
        ]
        return [[sets[part] for sets in by_layer] for part in range(self.count)]

    def widths_of(self, part: int) -> tuple[int, ...]:
        """Units of each hidden layer."""
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
        self.parts = parts


def parted(chain: Chain, *, count: int, group: int, seed: int) -> JointChain:
    """The joint chain, which says how it is cut. Raises ModelError or OptionError, in words, where that cannot be."""
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
    """What `part` has of the whole's `block`, whose module on the meta device is `module`."""
    if not parts.has_place(part, block.number):
        return PartBlock(part, block, absent, chain, absent)
    own, units = parts.cuts[block.number], parts.widths_of(part)
    # What is alike where every factory builds the same is alike in all parts of one width.
    like = (block.same_as, units, tuple(own.items()), parts.count)
    source = partial(narrowed, module, block.number, parts.layers, own, units, parts.count)
    if parts.is_dealt(block.number):
        assert parts.section is not None
        source = partial(_dealt, source, parts.section.branch, parts.count)
    return PartBlock(part, block, source, chain, like, is_cut_out=block.is_cut_out)


def _dealt(source: Factory, branch: str, parts: int) -> nn.Module:
    return scaled(source(), branch, parts)


def _refuse_whole(chain: Chain, count: int) -> None:
    if chain.tile:
        raise ModelError("method ist cuts layers itself, and takes none in tiles: leave out --tile.")
    for block, following in pairwise(chain):
        if len(block.gives) != 1 or following.takes != block.gives:
            raise ModelError(
                "method ist trains networks in which each block hands one tensor to the next, and nothing passes over it; "
                f"between {block} and {following} there are more. Give the model as a list of blocks, or use --method auto."
            )
    tied = [str(block) for block in chain if block.tied]
    if tied:
        raise ModelError(
            f"method ist cuts each block's weights alone, so blocks must not share a parameter, as {tied[0]} does with an "
            "earlier one. Use --method auto."
        )
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
