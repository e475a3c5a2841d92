"""The stages of a run whose parameters begin to learn one after the other, as --unfreeze says.

The plan is made for the last one, in which all learns that ever does: no stage before it needs more.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import prod

from seqpart.errors import OptionError
from seqpart.model.blocks import Chain
from seqpart.model.freezing import Frozen
from seqpart.profile.blocks import BlockCost
from seqpart.store.layout import TensorSpec
from seqpart.units import format_size


def late_parameters(chain: Chain, costs: Sequence[BlockCost], frozen: Frozen, per_epoch: int, updates: int) -> dict[str, int]:
    """Returns {name: number of updates before the parameter learns} of those that do not learn from the beginning.

    per_epoch, updates: of an epoch, and of the run. Raises OptionError for times beyond the run, and where at first nothing
    learns.
    """
    for pattern, time in frozen.unfreeze.items():
        if time.updates(per_epoch) >= updates:
            raise OptionError(
                f"--unfreeze: {pattern}={time}: expected a time before the end of the run, which has {updates:,} updates "
                f"({per_epoch:,} in an epoch); found one after which nothing is trained. Give an earlier one, or --freeze it."
            )
    others = dict[str, list[str]]()
    ties = ((tie.owner.exported(tie.owner_name), block.exported(tie.name)) for block in chain for tie in block.tied)
    for name, other in (*ties, *((name, alias) for alias, name in chain.aliases.items())):
        others.setdefault(name, []).append(other)
    found, every = dict[str, int](), dict(_trainable(chain, costs))
    for name in every:
        if times := frozen.times([chain.wholes.get(name, name), *others.get(name, ())]):
            found[name] = min(time.updates(per_epoch) for time in times)
    if every and len(found) == len(every):
        raise OptionError(
            f"--unfreeze: expected something that learns from the first update on; found that all does later, from update "
            f"{min(found.values()) + 1:,} on. Leave a part out, such as the last layer."
        )
    return found


def stages_in_words(chain: Chain, costs: Sequence[BlockCost], late: Mapping[str, int], frozen: Frozen) -> list[str]:
    """Says what learns from which update on, a line for each stage; nothing without the two options."""
    if not (frozen.freeze or frozen.unfreeze):
        return []
    specs = dict(_trainable(chain, costs))
    numbers = sum(prod(spec.shape) for spec in specs.values()) + sum(cost.frozen for cost in costs)
    found, starts = list[str](), sorted({0, *late.values()})
    for start in starts:
        learn = [spec for name, spec in specs.items() if late.get(name, 0) <= start]
        count, nbytes = sum(prod(spec.shape) for spec in learn), sum(spec.nbytes for spec in learn)
        room = ", which the plan is made for" if start == starts[-1] and start else ""
        found.append(f"from update {start + 1:,} on {count:,} of {numbers:,} weights learn ({format_size(nbytes)}){room}")
    return found


def _trainable(chain: Chain, costs: Sequence[BlockCost]) -> Iterator[tuple[str, TensorSpec]]:
    """Yields the parameters that the plan has room to train, each by its name in the model."""
    for block, cost in zip(chain, costs, strict=True):
        yield from ((block.exported(spec.name), spec) for spec in cost.layout.specs if spec.name in cost.trainable)
