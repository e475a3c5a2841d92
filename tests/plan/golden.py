"""Plans and schedules of the configurations of benchmarks/prediction, on a machine that is not measured.

python -m tests.plan.golden      writes golden.json anew: only for a change of plans that is meant
"""

import contextlib
import io
import json
import tempfile
from pathlib import Path

import pytest
import xxhash

from benchmarks.prediction import Case, cases
from seqpart.profile.trials import Trials
from seqpart.train import main
from tests import machine

KEPT = Path(__file__).with_suffix(".json")
CONFIGURATIONS = {" ".join(case.arguments()): case for case in cases()}
HELD = 230 << 20


def known(patch: pytest.MonkeyPatch) -> None:
    """Nothing is run or looked at: what a plan says is a function of the configuration."""
    machine.known_speeds(patch)
    machine.known_runtime(patch, HELD)
    patch.setattr(Trials, "held", lambda _: HELD)
    patch.setattr(Trials, "run", lambda *_: False)


def answer(case: Case) -> dict[str, object]:
    """The plan, and a digest of the steps that are printed; or why there is none."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()) as said:
        place, errors = Path(folder) / "plan.json", io.StringIO()
        words = [*case.arguments(), "--dry-run", "--print-schedule", "--plan-out", str(place), "--output-dir", f"{folder}/run"]
        words.remove("--quiet")
        with contextlib.redirect_stderr(errors):
            code = main(words)
        if code:
            return {"code": code, "said": errors.getvalue().splitlines()}
        plan = json.loads(place.read_text())
        del plan["device"]  # it has the number of threads in its name
        steps = "\n".join(line for line in said.getvalue().splitlines() if line.startswith("["))
        return {"plan": plan, "steps": xxhash.xxh3_64_hexdigest(steps.encode())}


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as patch:
        known(patch)
        lines = [f"{json.dumps(name)}: {json.dumps(answer(case))}" for name, case in CONFIGURATIONS.items()]
    KEPT.write_text("{\n" + ",\n".join(lines) + "\n}\n")
