"""The steps of a session that have losses of their own: which loss is computed, and what learns."""

from collections.abc import Container, Mapping, Sequence

from seqpart.data.step_losses import StepLosses
from seqpart.errors import DataError, ModelError, OptionError
from seqpart.runtime.run import Run


class Turns:
    """The steps of a session. losses: by step; None: all steps are alike. learns: {step: patterns of what it trains}."""

    def __init__(
        self, losses: StepLosses | None, learns: Mapping[str, str | Sequence[str]] | None, reached: Mapping[str, Container[str]]
    ) -> None:  # fmt: skip
        """reached: {step: names of the parameters that its loss has a gradient for}, where that is known."""
        self._losses, self._reached = losses, reached
        given = {step: [one] if isinstance(one, str) else [*one] for step, one in (learns or {}).items()}
        self._learns = {step: [part.strip() for one in patterns for part in one.split(",")] for step, patterns in given.items()}
        if given and losses is None:
            raise OptionError("learns: it goes with losses by step, such as loss={'d': d_loss, 'g': g_loss}. Leave it out.")
        if given and losses is not None:
            losses.refuse_strangers(self._learns)

    def begin(self, run: Run) -> None:
        """Raises OptionError for patterns that match nothing, and for an optimizer that cannot take turns."""
        self._run = run
        run.pauses.refuse_strangers(self._learns)
        some = self._learns or not all(map(run.pauses.are_in, self._reached.values()))
        if some and any(one.counts for one in run.prepared.stages[0].optimizers):
            raise OptionError(
                "learns: the optimizer counts updates in its groups, and would count the updates of all steps. Take one that "
                "counts with each parameter, such as AdamW."
            )

    def batch_of(self, given: Sequence[object]) -> tuple[str | None, object]:
        """Returns (the step's name, its batch) of the arguments of `session.step`."""
        if self._losses is None:
            if len(given) != 1:
                raise DataError("step: expected one batch; found several arguments. Give x and y as one: step((x, y)).")
            return None, given[0]
        if len(given) != 2:
            raise DataError(f"step: expected the name of a step and a batch; found {len(given)} arguments: step('d', batch).")
        return self._losses.checked(given[0]), given[1]

    def take(self, step: str | None) -> None:
        """Makes `step` the one to be made next: its loss, and what learns in it. None: all losses are computed, and summed."""
        if self._losses is not None:
            self._losses.step = step
        if step is not None and (step in self._learns or step in self._reached):
            if self._learns and self._run.pauses.changed:
                raise ModelError(
                    "requires_grad was changed between the steps of a session whose `learns` says what each of them trains. "
                    "Leave one of them out."
                )
            self._run.pauses.let_learn(self._learns.get(step), self._reached.get(step))
