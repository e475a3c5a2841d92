"""Plans to go on with after a failed allocation.

They keep the method: another one has other phases, and the position counts phases.
"""

from dataclasses import replace

from seqpart.errors import DataError, DoesNotFit, ModelError, OutOfMemory
from seqpart.plan.plan import PlanRequest
from seqpart.plan.planner import ExecutionPlan, Planner
from seqpart.runtime.executor import out_of_memory
from seqpart.runtime.observer import Failure
from seqpart.schedule.steps import Verb
from seqpart.units import format_limit, format_size

_SPARE, _MOST_SPARE = 32, 8
"""1 / share of the limit that is left free after failed allocations: of the first share, doubled each time, and the last."""


def planned_anew(planner: Planner, prepared: ExecutionPlan, request: PlanRequest) -> ExecutionPlan:
    """Returns a plan for the same method and its same starts. Raises DoesNotFit."""
    return planner.prepare(replace(request, methods=(prepared.method,), starts=prepared.plan.starts))


def planned_or_none(planner: Planner, prepared: ExecutionPlan, request: PlanRequest) -> ExecutionPlan | None:
    try:
        return planned_anew(planner, prepared, request)
    except DoesNotFit:
        return None


def planned_smaller(planner: Planner, prepared: ExecutionPlan, request: PlanRequest) -> ExecutionPlan | None:
    """Returns a plan that needs less with the same micro-batch, so that the results stay the same, or None."""
    limit, used = prepared.plan.limit, prepared.plan.peak - prepared.request.spare
    spare = max(limit // _SPARE, 2 * request.spare)
    if spare > limit // _MOST_SPARE:
        return None
    smaller = planned_or_none(planner, prepared, replace(request, spare=spare, saved=None))
    return smaller if smaller is not None and smaller.plan.peak - spare < used else None


def planned_halved(planner: Planner, prepared: ExecutionPlan, failure: Failure) -> ExecutionPlan:
    """Returns a plan with half the micro-batch. Raises OutOfMemory if that cannot help, and DoesNotFit."""
    plan, largest = prepared.plan, failure.micro_batch
    if failure.step.verb is Verb.LOAD:
        raise out_of_memory(failure.step, failure.text)
    if largest == 1:
        raise OutOfMemory(
            f"memory ran out in {failure.step} at micro-batch 1, inside the limit of {format_size(plan.limit)}: "
            f"{failure.text}. Give more than {format_limit(plan.limit)}, or cut finer with --partitions "
            f"{len(plan.partitions) + 1}."
        )
    try:
        return planned_anew(planner, prepared, replace(prepared.request, micro_batch=largest // 2))
    except (ModelError, DataError) as error:  # as BatchNorm says of a single row
        raise OutOfMemory(
            f"memory ran out in {failure.step} at micro-batch {largest}, inside the limit of {format_size(plan.limit)}, "
            f"and the model does not take {largest // 2} row(s) at once. Give more than {format_limit(plan.limit)}."
        ) from error
