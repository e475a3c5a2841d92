"""The chain of the whole network with those of its parts behind it, and what says how the ones are cut out of the other.

    blocks        0 .. B-1    B .. 2B-1    2B .. 3B-1   ...
                  the whole   part 0       part 1

A part's block is the whole's with fewer units of its hidden layers, and has a home of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

from seqpart.errors import ModelError, OptionError
from seqpart.model.blocks import MOST_BLOCKS, Block, Chain, Factory
from seqpart.parts.hidden import HiddenLayer, hidden_layers
from seqpart.parts.indices import Ints, groups_of, index_sets, widths
from seqpart.parts.narrow import NEURONS, Cut, cuts_of, narrowed, template
from seqpart.parts.statistics import observes


class PartBlock(Block):
    """Block `number` of the joint chain: what `part` has of the whole's block `origin`."""

    def __init__(self, number: int, part: int, origin: Block, source: Factory, blocks: int, like: object) -> None:
        """blocks: of the whole. like: equal for blocks of parts that have as many units."""
        super().__init__(number, origin.name, source)
        self.part, self.origin = part, origin
        first = (part + 1) * (blocks + 1) + origin.number
        self.takes, self.gives = (first,), (first + 1,)
        self.draws_as = part * blocks + origin.number  # those of the only part draw what the whole's would
        self._same = like

    def __str__(self) -> str:
        return f"block {self.origin.number} ({self.kind}) of subnet {self.part}"

    @property
    def kind(self) -> str:
        return self.origin.kind


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

    def units(self, round_: int) -> list[list[Ints]]:
        """Of each part, its units of each hidden layer in that round."""
        return _drawn(self, round_)

    def block_of(self, part: int, block: int) -> int:
        """Number in the joint chain of what `part` has of the whole's `block`."""
        return self.blocks * (1 + part) + block

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
        whole = [b for b in range(self.blocks) if not self.cuts[b]]
        shared = f"; blocks {', '.join(map(str, whole[:8]))}{', ...' if len(whole) > 8 else ''} whole in each" if whole else ""
        return [f"{self.count} subnet(s), hidden layers divided among them: {layers}{shared}"]

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

    def __init__(self, blocks: Sequence[Block], parts: Parts) -> None:
        super().__init__(blocks, begins=tuple(range(0, len(blocks), parts.blocks)))
        self.parts = parts


def parted(chain: Chain, *, count: int, group: int, seed: int) -> JointChain:
    """The joint chain, which says how it is cut. Raises ModelError or OptionError, in words, where that cannot be."""
    _refuse_whole(chain, count)
    whole = [template(block) for block in chain]
    layers = tuple(hidden_layers(whole))
    _refuse_undivided(chain, layers, count)
    cuts = tuple(cuts_of(whole, layers))
    norms = frozenset(number for number, module in enumerate(whole) if any(map(observes, module.modules())))
    parts = Parts(count, len(chain), group, seed, layers, cuts, norms)
    blocks: list[Block] = [*chain]
    for part in range(count):
        units = parts.widths_of(part)
        for block, module, own in zip(chain, whole, cuts, strict=True):
            # What is alike where every factory builds the same is alike in all parts of one width.
            like = (block.same_as, units, tuple(own.items()), count)
            source = partial(narrowed, module, block.number, layers, own, units, count)
            blocks.append(PartBlock(parts.block_of(part, block.number), part, block, source, len(chain), like))
    return JointChain(blocks, parts)


def _refuse_whole(chain: Chain, count: int) -> None:
    if any(block.is_cut_out for block in chain):
        raise ModelError(
            "method ist divides the layers of an nn.Sequential or a list of blocks; this model has a forward of its own, in "
            "which nothing says which layers belong together. Give its blocks as a list, or use --method auto."
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


def _refuse_undivided(chain: Chain, layers: Sequence[HiddenLayer], count: int) -> None:
    if not layers:
        raise ModelError(
            "method ist found no hidden layer to divide: it looks for nn.Linear, a normalisation and elementwise activations, "
            f"and nn.Linear again, or for modules that have hidden_layers(); found {', '.join(map(str, chain))}. Use --method "
            "auto."
        )
    narrowest = min(layers, key=lambda layer: layer.units)
    if narrowest.units < count:
        block = chain[narrowest.rows[0].block]
        what = "heads" if narrowest.alone else "neurons"
        raise OptionError(
            f"--subnets {count}: {block} has a hidden layer of {narrowest.units} {what}, and each subnet needs one. Give at "
            f"most {narrowest.units}."
        )
