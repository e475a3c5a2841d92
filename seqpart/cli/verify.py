"""`seqpart verify`: its options, and what it refuses."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from seqpart.cli.arguments import gathered, has_flag, options_of
from seqpart.cli.job import Job, opened, saved_plan
from seqpart.cli.sizing import smallest_limit_named
from seqpart.config import Method
from seqpart.errors import OptionError
from seqpart.fields import flag_of
from seqpart.report.reporter import Reporter
from seqpart.verify.verification import verify


@dataclass(frozen=True, kw_only=True)
class VerifyJob(Job):
    """Prove on your own model that training under the limit gives the bits of full training, or name the tensor that differs.

    Some updates are made under --mem-limit, again with a deliberately wrong replay, which must be noticed, and again by
    --reference, which needs the memory of full training. Exit code 0: every bit is the same; 5: not, or the check is blind.
    """

    method: Method = "streamed"
    """Method to verify: streamed, checkpointed, or auto (the one that training would take)."""
    steps: int = 3
    """Number of updates to compare, from the first one on."""
    reference: str = "full"
    """Method to compare with: full, or checkpointed or streamed, which need less memory."""
    sweep: int = 0
    """Number of other plans to compare too, drawn with --seed from all cuts, slots, partitions that stay, graphs that are kept
    or offloaded, places of boundaries, with the heap kept or not."""
    plan: Path | None = None
    """Verify this plan, which --plan-out saved, with the method that it names."""


_NOT_OURS = (
    "resume", "plan_out", "dry_run", "print_schedule", "output_dir", "overwrite", "recovery_epochs", "trace", "log",
)  # fmt: skip


def verified(arguments: Sequence[str]) -> None:
    """`seqpart verify ARGUMENTS`. Raises what `verify` raises."""
    given_arguments = gathered(list(arguments), VerifyJob)
    job = options_of(VerifyJob, given_arguments, "seqpart verify")
    given = [flag_of(name) for name in _NOT_OURS if getattr(job, name)]
    if given:
        raise OptionError(f"{', '.join(given)}: verify trains a few updates and keeps nothing. Leave it out.")
    reporter = Reporter(quiet=job.quiet, flags=True)
    reuse, options = saved_plan(job), job.values()
    if reuse is not None and not has_flag(given_arguments, "--method"):
        options.pop("method")
    with ExitStack() as stack:
        _, trainer, train, test = opened(job, reporter, stack)
        options |= {"weights": trainer.settings.weights, "weights_partial": trainer.settings.weights_partial}
        stack.enter_context(smallest_limit_named(job, trainer, train, test, reuse))
        verify(
            trainer.model, train, steps=job.steps, reference=job.reference, reuse=reuse, sweep=job.sweep, reporter=reporter,
            **options,
        )  # fmt: skip
