"""Settings: the options of a run, checked one by one, against each other, and by the method that they name."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, Self

from seqpart import config
from seqpart.config import EVALUATION, IN_PYTHON, MOST, NO_LIMIT, NO_METHOD, Config, given_of
from seqpart.errors import OptionError
from seqpart.fields import as_text, checked_value, flag_of, joined, out_of_range, per_partition, values_of
from seqpart.methods import METHODS, methods_named
from seqpart.methods.method import Method
from seqpart.model.losses import LossName
from seqpart.model.named_optimizers import NEED_WHOLE
from seqpart.model.scheduler import rate_schedule
from seqpart.schedule import lengths
from seqpart.schedule.best import criterion_of
from seqpart.text import refuse_unusable, with_suggestion


@dataclass(frozen=True, kw_only=True)
class Settings(Config):
    """Settings of a training run: a Config whose values have the types of their fields and go together.

    Raises OptionError for values of another type, out of range, or that contradict each other, and where `method` is missing.
    """

    def __post_init__(self) -> None:
        """Converts every value to its field's type. Raises one OptionError that names everything wrong."""
        if self.method is None:
            raise OptionError(NO_METHOD)
        problems, hints = list[str](), hints_of(type(self))
        for field in fields(self):
            value = getattr(self, field.name)
            try:
                value = checked_value(field.name, value, hints[field.name])
                if isinstance(value, Path):
                    refuse_unusable(flag_of(field.name), value)
            except OptionError as error:
                problems.append(error.with_flags)
                value = next(iter(METHODS)) if field.name == "method" else field.default
            object.__setattr__(self, field.name, value)
        epochs = tuple(map(lengths.whole_where_it_is, values_of(self.epochs)))
        object.__setattr__(self, "epochs", epochs if isinstance(self.epochs, tuple) else epochs[0])
        _ = self.saving, self.exporting, self.partition_choice(), self.tile_bytes, self.chunks, self.tests, self.frozen
        criterion_of(self.best_by)
        if isinstance(self.lr_schedule, str):
            rate_schedule(self.lr_schedule, self.warmup_updates)
        problems += self._contradictions()
        problems += filter(None, (out_of_range(name, getattr(self, name), hint) for name, hint in hints.items()))
        if problems:
            raise OptionError(joined(problems))

    @property
    def methods(self) -> tuple[Method, ...]:
        """The method of that name, or the exact ones that `auto` chooses from."""
        return methods_named(self.method)

    @property
    def tests_in_turn(self) -> bool:
        """True if partitions may be tested one after another."""
        return not all(method.stays for method in self.methods)

    @property
    def is_exact(self) -> bool:
        """True if updates are those of a plain loop over whole batches: exact methods but psl, which takes scores in pairs."""
        return self.methods[0].exact and not self.methods[0].in_pairs

    def of_partitions(self, name: str, count: int) -> tuple[Any, ...]:
        """Values of this option for each of `count` partitions; an exact method trains the network as one, with one value."""
        flag, values = flag_of(name), values_of(getattr(self, name))
        if self.methods[0].alone:
            return per_partition(flag, values, count)
        if len(values) > 1:
            raise OptionError(f"{flag} {as_text(values)}: values for each partition go with --method sil only. Give one value.")
        return values * count

    @property
    def whole_weights(self) -> list[str]:
        """Names of the optimizers that need each weight as a whole."""
        return [name for name in values_of(self.optimizer) if name in NEED_WHOLE]

    @property
    def averages(self) -> bool:
        """True if the result has averaged weights beside those that are trained."""
        return self.ema is not None or "schedulefree" in values_of(self.optimizer)

    def _contradictions(self) -> Iterator[str]:
        """Yields a message for every pair of options that contradict each other."""
        if self.trace is not None and self.trace.is_dir():
            yield f"--trace: expected the name of a file; found the directory {self.trace}"
        if self.weights_partial and self.weights is None:
            yield "--weights-partial goes with --weights. Leave it out"
        own = {group for method in self.methods for group in method.options}
        for group in dict.fromkeys(group for other in METHODS.values() for group in other.options if group not in own):
            owners = " or ".join(other.name for other in METHODS.values() if group in other.options)
            for name in given_of(group, self):
                yield f"{flag_of(name)} goes with --method {owners} only; found --method {self.method}. Leave it out"
        if len(self.methods) == 1:
            yield from self.methods[0].contradictions(self)
        if self.warmup_updates and not isinstance(self.lr_schedule, str):
            yield "--warmup-updates goes with a schedule given by name. Let the scheduler warm up, and leave it out"
        if not 0 <= self.label_smoothing < 1:
            yield f"--label-smoothing: expected a share from 0 up to 1, such as 0.1; found {self.label_smoothing}"
        for flag, share in (("--mixup", self.mixup), ("--cutmix", self.cutmix)):
            if not 0 <= share <= MOST:
                yield f"{flag}: expected the parameter of a Beta distribution, such as 0.2, or 0 for none; found {share}"
            if share and (not self.is_exact or self.loss not in (None, "cross-entropy")):
                yield f"{flag} goes with --method auto, streamed, checkpointed or full, and with --loss cross-entropy"
        if self.no_decay and not self.weight_decay:
            yield "--no-decay: there is no weight decay to leave out. Give --weight-decay"
        if self.moments_dtype is not None and self.rounded_moments is None:
            yield "--moments-dtype goes with --rounding stochastic. Leave it out"
        if self.rounded_moments is not None and self.divides_weights:
            yield f"--rounding stochastic draws by weights' names, and {self.divides_weights} divides them. Leave it out"
        if self.ema is not None and not 0 < self.ema < 1:
            yield f"--ema: expected a decay between 0 and 1, such as 0.999; found {self.ema}"
        if self.ema is not None and "schedulefree" in values_of(self.optimizer):
            yield "--ema does not go with --optimizer schedulefree, which averages the weights itself. Leave it out"
        for flag, given, cure in (
            ("--unfreeze", self.unfreeze is not None, "Take one of these, or --freeze alone"),
            ("--optimizer-on host", self.optimizer_on == "host", "Leave it out"),
            ("--compile", self.compile, "Leave it out"),
        ):
            if given and not self.is_exact:
                yield f"{flag} goes with --method auto, streamed, checkpointed or full; found --method {self.method}. {cure}"
        if self.unfreeze is not None and self.ema is not None:
            yield "--unfreeze does not go with --ema, which averages from the first update on. Leave one out"
        if self.compile and self.tile_bytes:
            yield "--compile does not go with --tile, which replaces layers by others. Leave one out"
        if self.compile and self.unfreeze is not None:
            yield (
                "--compile does not go with --unfreeze: with other weights that learn, layers would be compiled again in the "
                "middle of the run. Leave one out"
            )
        if self.export_every is not None and not self.methods[0].exact:
            yield f"--export-every goes with exact methods; found --method {self.method}. Leave it out"
        if self.keep_exports is not None and self.export_every is None:
            yield "--keep-exports: nothing is exported. Give --export-every"
        if self.export_every == EVALUATION and self.tests == lengths.AT_THE_END:
            yield "--export-every evaluation needs evaluations: give --eval-every"
        yield from self._lengths()
        if self.divides_weights and (whole := self.whole_weights):
            yield f"--optimizer {whole[0]} needs each weight as a whole, and {self.divides_weights} divides it. Take another"

    def _lengths(self) -> Iterator[str]:
        """Yields the contradictions of the options for the run's length and its evaluations."""
        method, exact, epochs = self.method, self.methods[0].exact, values_of(self.epochs)
        if self.eval_every is not None and self.test_every is not None:
            yield "--eval-every and --test-every both say how often to evaluate. Leave one out"
        if self.max_steps is not None and self.epochs != Settings.epochs:
            yield "--max-steps is given instead of --epochs: leave one out"
        for flag, given in (("--early-stopping", self.early_stopping is not None), ("--keep-best", self.keep_best)):
            if given and exact and self.tests == lengths.AT_THE_END:
                yield f"{flag} needs evaluations to compare: give --eval-every"
            elif given and not exact:
                yield f"{flag} goes with exact methods; found --method {method}. Leave it out"
        if exact:
            if self.best_by is not None and self.tests == lengths.AT_THE_END:
                yield "--best-by compares evaluations: give --eval-every, or leave it out"
            return
        if self.max_steps is not None:
            yield f"--max-steps goes with exact methods; method {method} trains its parts for whole --epochs. Leave it out"
        if not all(float(number).is_integer() for number in epochs):
            yield f"--epochs: method {method} trains its parts for whole epochs; found {', '.join(map(str, epochs))}"
        if lengths.interval_of(self.eval_every, None).updates is not None:
            yield f"--eval-every: method {method} is tested between epochs; give it as '1 epoch'"

    @classmethod
    def of(cls, **options: Any) -> Self:
        """Settings from options by name. Raises OptionError for a name that is not a setting, and where no limit is given."""
        names = {field.name for field in fields(cls)}
        if unknown := sorted(set(options) - names):
            known = sorted({*names, "quiet"})  # which Trainer takes beside them
            named = with_suggestion(unknown, known, IN_PYTHON)
            raise OptionError(f"unknown setting(s): {named}" + ("" if named.endswith("?") else f" Known: {', '.join(known)}."))
        if "mem_limit" not in options:
            raise OptionError(NO_LIMIT)
        return cls(**options)

    @property
    def divides_weights(self) -> str:
        """The option that divides weights into pieces that are updated one by one; "" if there is none."""
        return f"method {self.method}" if self.methods[0].divides_weights else "--tile" if self.tile_bytes else ""

    @property
    def loss_name(self) -> LossName | None:
        return self.loss or self.methods[0].loss_name

    @property
    def shuffles(self) -> bool:
        return self.methods[0].shuffles(self) if self.shuffle == "auto" else self.shuffle


def hints_of(kind: type[Any]) -> dict[str, Any]:
    """Returns the types of its fields, each with its Note; `method` may be any that is known, also a registered one."""
    return config.hints_of(kind) | {"method": Literal["auto", *METHODS]}
