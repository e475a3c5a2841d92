"""Plans to go on with behind a failed allocation.

The method stays: another one has other phases, and the position counts these.
"""

from dataclasses import replace

from seqpart.errors import DoesNotFit
from seqpart.planning.plan import PlanRequest
from seqpart.planning.preparation import Preparation, Prepared

_SPARE, _MOST_SPARE = 32, 8
"""Shares of the limit that are left free behind failed allocations: the first, doubled each time, and the last."""


def planned_anew(preparation: Preparation, prepared: Prepared, request: PlanRequest) -> Prepared:
    """Raises DoesNotFit."""
    return preparation.prepare(replace(request, methods=(prepared.method,), starts=prepared.plan.starts))


def planned_or_none(preparation: Preparation, prepared: Prepared, request: PlanRequest) -> Prepared | None:
    try:
        return planned_anew(preparation, prepared, request)
    except DoesNotFit:
        return None


def planned_smaller(preparation: Preparation, prepared: Prepared, request: PlanRequest) -> Prepared | None:
    """A plan that needs less at the same micro-batch, so that the results stay what they were; None: there is none."""
    limit, used = prepared.plan.limit, prepared.plan.peak - prepared.request.spare
    spare = max(limit // _SPARE, 2 * request.spare)
    if spare > limit // _MOST_SPARE:
        return None
    smaller = planned_or_none(preparation, prepared, replace(request, spare=spare, saved=None))
    return smaller if smaller is not None and smaller.plan.peak - spare < used else None
