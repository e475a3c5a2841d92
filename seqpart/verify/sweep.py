"""The bits of other plans: some that are drawn from all that a plan may answer, and not only what the planner prefers."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from random import Random

from seqpart.errors import DataError, DoesNotFit, ModelError, VerifyMismatch
from seqpart.methods import methods_named
from seqpart.plan.plan import Plan
from seqpart.plan.preparation import Preparation, Prepared
from seqpart.plan.problem import starts_of
from seqpart.report.reporter import Reporter
from seqpart.trainer import Trainer
from seqpart.verify.answers import Answers, Space
from seqpart.verify.digests import Digests
from seqpart.verify.variant import Variant, prepared_to_verify

_REFUSALS = 10
"""Draws for each plan that is wanted: some the model refuses, or come to what is known already."""


def drawn_plans(limited: Variant, trainer: Trainer, train: object, count: int) -> tuple[Variant, ...]:
    """At most `count` ways to train that differ in their answers from `limited` and from each other, in all the memory that
    `trainer` has. The seed of the run draws them, so that they come again."""
    with closing(prepared_to_verify(trainer, train)) as preparation:
        found = enumerate(_drawn(limited.prepared.plan, preparation, count), 1)
        return tuple(Variant.of(f"plan {number}", preparation, prepared) for number, prepared in found)


def _drawn(plan: Plan, preparation: Preparation, count: int) -> Iterator[Prepared]:
    space = _space(plan, preparation)
    random, known, left = Random(preparation.settings.seed), [Answers.of(plan)], count
    for _ in range(_REFUSALS * count):
        answers = space.draw(random, known) if left else None
        if answers is None:
            return
        known.append(answers)
        asked = replace(preparation.request, saved=answers.asked(plan, len(preparation.chain)))
        try:
            prepared = preparation.planned(asked)
        except (DoesNotFit, ModelError, DataError):
            continue
        carried_out = Answers.of(prepared.plan)  # what the model refuses is left out of it
        if carried_out == answers or carried_out not in known:
            known.append(carried_out)
            left -= 1
            yield prepared


def _space(plan: Plan, preparation: Preparation) -> Space:
    problem = preparation.problem(replace(preparation.request, micro_batch=plan.micro_batch, saved=None))
    return Space(
        starts=tuple(starts_of(problem)), tiers=tuple(dict.fromkeys((*problem.boundary_tiers, "disk"))),
        graph_tiers=problem.graph_tiers, heap=problem.may_keep_heap, streams=not methods_named(plan.method)[0].stays,
    )  # fmt: skip


def agreed(limited: Variant, first: Digests, other: Variant, reporter: Reporter) -> Digests:
    """What `other` was seen to do. Raises VerifyMismatch where a bit is not that of the limited run."""
    digests = Digests(first.steps, expected=first.seen)
    other.run(digests, reporter)
    if digests.first is not None:
        raise VerifyMismatch(
            f"{limited.method} as it was planned ({Answers.of(limited.prepared.plan)}) and with another plan "
            f"({Answers.of(other.prepared.plan)}) differ, first in {digests.first} {digests.first.when(first.steps)}: a block "
            "does something else where its partition stays, comes again or is run again. Does one keep what is neither "
            "parameter nor buffer, or look at where its input comes from?"
        )
    return digests
