"""Files that are whole, by their checksums, and say what no run wrote: each is refused in words, or changes nothing.

25 of 75 such checkpoints, made by hand, ended in a TypeError, KeyError or OSError, and one whose position lay behind the last
update gave the half-trained weights as the result.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from benchmarks.campaign.lies import TOLD, at, body_of, changes, checkpoint_of, places, put
from seqpart import Trainer
from seqpart.checkpoint.leftovers import Kind, classified, report_leftovers
from seqpart.checkpoint.manifest import CHECKPOINT, PREVIOUS
from seqpart.checkpoint.marker import MARKER
from seqpart.checkpoint.run_directory import RunDirectory
from seqpart.cli.arguments import gathered, options_of
from seqpart.cli.job import Job
from seqpart.errors import CorruptFile, SeqpartError
from seqpart.files import Folder
from seqpart.plan.plan import Plan
from seqpart.report.page_data import read_run
from seqpart.store.atomic import with_checksum
from tests.checkpoint.test_leftovers import killed as left_behind
from tests.choice import only_quick

ROWS = torch.randn(40, 6, generator=torch.Generator().manual_seed(1)), torch.arange(40) % 3
WAYS = {
    "full": {"method": "full"},
    "sil": {"method": "sil", "partitions": 2},
    "streamed": {"method": "streamed", "partitions": 2, "eval_every": "2", "keep_best": True},
    "ist": {"method": "ist", "subnets": 2, "local_steps": 2},
}
UPDATE = {"full": 3, "sil": 7, "streamed": 7, "ist": 5}
"""Behind which the run is stopped."""
JOB = {"method": "full", "mem_limit": "2GB", "lr": 0.001, "batch_size": [8, 4], "momentum": 0, "depth": 3, "weights": None}


class Stopped(Exception):
    pass


class Stop:
    def __init__(self, update):
        self.left = update

    def on_step(self, event):
        self.left -= 1
        if not self.left:
            raise Stopped


def trainer(way, place):
    torch.manual_seed(0)
    layers = [nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3)]
    options = {"batch_size": 8, "micro_batch_size": 4, "epochs": 2, "momentum": 0.9, "optimizer": "sgd", "lr": 0.1}
    options |= {"mem_limit": "2GB", "save_every": 1, "quiet": True, "output_dir": place, **WAYS[way]}
    return Trainer(nn.Sequential(*layers), **options)


def bits(weights):
    return {name: tensor.numpy().tobytes() for name, tensor in weights.items()}


def go_on(way, place, start=None):
    return bits(trainer(way, place).fit(ROWS, ROWS, resume=start or place).state_dict())


@pytest.fixture(scope="module", params=only_quick(WAYS, ["streamed"]))
def killed(request, tmp_path_factory):
    """(how it trains, the directory of a run that was stopped, a function that copies it, the weights that it comes to)."""
    root = tmp_path_factory.mktemp(request.param)
    with pytest.raises(Stopped):
        trainer(request.param, root / "run").fit(ROWS, ROWS, callbacks=[Stop(UPDATE[request.param])])

    def copied():
        shutil.rmtree(root / "copy", ignore_errors=True)
        return Path(shutil.copytree(root / "run", root / "copy"))

    right = bits(trainer(request.param, root / "whole").fit(ROWS, ROWS).state_dict())
    assert go_on(request.param, copied()) == right
    return request.param, root / "run", copied, right


@st.composite
def changed(draw, found):
    """(where, what it is now) of one thing in JSON that is another."""
    place = draw(st.sampled_from([*places(found)]))
    value = draw(st.sampled_from([*changes(at(found, place))]))
    return place, value


def write(root, body):
    (root / CHECKPOINT).write_text(checkpoint_of(body))


SLOW = settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
QUICK = settings(SLOW, max_examples=20)


def test_a_checkpoint_with_one_wrong_thing_is_refused_in_words_or_goes_on_to_the_same_bits(killed):
    way, run, copied, right = killed
    body = body_of(run)

    @SLOW
    @given(changed(body))
    def holds(change):
        place, value = change
        write(root := copied(), put(body, place, value))
        try:
            found = go_on(way, root)
        except SeqpartError:
            return
        assert found == right or TOLD.intersection(place[1:2])

    holds()


def test_what_is_no_checkpoint_is_named_with_the_field_and_the_one_before_it_goes_on(killed):
    way, run, copied, right = killed
    body = body_of(run)
    lies = {
        ("scratch",): "a\0b", ("homes",): {}, ("homes", "block-00000", "file"): "../../x", ("rows", "train-0", "count"): 10**15,
        ("state", "position"): [0, 10**6], ("state", "place"): [9, 0, None, False, False], ("state", "micro_batches"): [2],
        ("state", "tally", "rows"): 3, ("state", "functions"): 5, ("state", "loop"): [1], ("state", "losses"): [float("inf")],
        ("state", "plan", "slots"): -1, ("state", "epochs"): [2],
    }  # fmt: skip
    for place, value in lies.items():
        if value == at(body, place):
            continue
        write(root := copied(), put(body, place, value))
        with pytest.raises(CorruptFile) as refusal:
            go_on(way, root)
        assert refusal.value.exit_code == 6
        assert place[-1] in str(refusal.value) or place[0] == "rows"
        assert f'resume="{root / PREVIOUS}"' in str(refusal.value), str(refusal.value)
    assert go_on(way, root, root / PREVIOUS) == right


@pytest.mark.parametrize("killed", ["streamed"], indirect=True)
def test_a_checkpoint_as_earlier_builds_of_this_version_wrote_it_goes_on(killed):
    """Plans were of format 4, sums had no weight, and nothing was said of evaluations and jobs."""
    way, run, copied, right = killed
    body = body_of(run)
    for name in ("loop", "job"):
        del body["state"][name]
    del body["state"]["tally"]["weight"]
    body["state"]["plan"] |= {"format": 4, "boundary_tier": "device"}
    for part in body["state"]["plan"]["partitions"]:
        del part["boundary_tier"], part["why"], part["rows_in_memory"]
    write(root := copied(), body)
    assert go_on(way, root) == right


@pytest.mark.parametrize("killed", ["streamed"], indirect=True)  # the files are the same in all
def test_homes_and_rows_that_say_something_else_with_right_checksums_are_refused(killed):
    """A header that no block of this model has was decoded, and its bytes read as others; rows of too few checksums ended in
    an IndexError."""
    way, run, copied, _ = killed
    body = body_of(run)

    def headed(path, change):
        data = path.read_bytes()
        length = 8 + int.from_bytes(data[:8], "little")
        head = json.dumps(change(json.loads(data[8:length]))).encode().ljust(length - 8)
        path.write_bytes(data[:8] + head + data[length:])
        return xxhash.xxh3_64_hexdigest(data[:8] + head)

    def transposed(header):
        header["weight"]["shape"].reverse()
        return header

    def overlapping(header):
        header["weight"]["data_offsets"] = [0, 2**63]
        return header

    def strided(header):
        header["__metadata__"]["seqpart.strides"] = '{"weight": [[8, 6], [1]]}'
        return header

    def unchecked(header):
        return {name: entry for name, entry in header.items() if name != "__metadata__"}

    for change in (transposed, overlapping, strided, unchecked, lambda _: []):
        root = copied()
        digest = headed(root / "homes" / body["homes"]["block-00000"]["file"], change)
        write(root, put(body, ("homes", "block-00000", "header"), digest))
        with pytest.raises(CorruptFile):
            go_on(way, root)
    entry = body["rows"]["train-0"]
    for sums in ([], ["0" * 15], {"a": 1}):
        root = copied()
        (root / "rows" / entry["sums"]).write_text(json.dumps(sums))
        write(root, put(body, ("rows", "train-0", "digest"), xxhash.xxh3_64_hexdigest(json.dumps(sums).encode())))
        with pytest.raises(CorruptFile):
            go_on(way, root)


def test_a_plan_with_one_wrong_thing_is_refused_in_words_or_carried_out(killed):
    way, _, copied, _ = killed
    plan = trainer(way, copied()).plan(ROWS, ROWS)

    @SLOW
    @given(changed(json.loads(plan.to_json())))
    def holds(change):
        text = json.dumps(put(json.loads(plan.to_json()), *change))
        try:
            found = Plan.from_json(text, "plan.json")
            trainer(way, None).plan(ROWS, ROWS, reuse=found)
        except SeqpartError as refusal:
            assert refusal.exit_code in (2, 3)

    holds()


@QUICK
@given(data=st.data())
def test_a_marker_with_one_wrong_thing_keeps_what_is_there_or_is_told(tmp_path, data):
    shutil.rmtree(tmp_path / "runs", ignore_errors=True)
    root = left_behind(tmp_path / "runs" / "one")
    path = root / MARKER
    body = json.loads(path.read_text())
    path.write_text(json.dumps(put(body, *data.draw(changed(body)))))
    with Folder.at(root) as folder:
        found = classified(folder)
    assert found is not None
    told = [*report_leftovers(root.parent, 0)]
    if found.kind is Kind.UNKNOWN:
        assert found.why in told[0]
        assert [*(root / "homes").glob("*.safetensors")]
    for use in (read_run, RunDirectory):
        try:
            use(root)
        except SeqpartError as refusal:
            assert "marker" in str(refusal) or "homes and rows of the run" in str(refusal)
        else:
            continue


@QUICK
@given(change=changed(JOB))
def test_a_job_with_one_wrong_thing_is_refused_in_words_or_taken(tmp_path, change):
    """A list in a list, and a number where flags are, went on to the command's parser as text."""
    (tmp_path / MARKER).touch()
    (tmp_path / "job.json").write_text(with_checksum("job", put(JOB, *change)))
    try:
        options_of(Job, gathered(["--resume", str(tmp_path)], Job), "seqpart")
    except SeqpartError as refusal:
        assert refusal.exit_code in (2, 6)
    except SystemExit as refusal:  # by the parser, which says what it expects
        assert refusal.code == 2
