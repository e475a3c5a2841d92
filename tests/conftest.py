"""What every test shares: a fixed seed, and a report that names torch and the device."""

import gc
import importlib
import os
import signal

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("GOMP_SPINCOUNT", "0")  # other tests need the processors that waiting threads would spin on

from seqpart.launch.process import prepare_command

prepare_command(plans=False)  # before torch: most tests are about the command's own process

import torch  # noqa: E402

from seqpart.device.device import Device, describe_versions  # noqa: E402

# No test depends on time: a law that is checked slowly on a busy machine is no broken law.
settings.register_profile("seqpart", deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("seqpart")

importlib.import_module("torch._dynamo")  # before what is there is frozen

# A shell starts what runs in the background without SIGINT, and every run that a test starts would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


OWN = "SEQPART_OWN_PROCESS"  # in the environment of a test that has a process of its own


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def as_many_threads_afterwards():
    """With other threads products round otherwise: a test that compared with another process's bits failed behind one that left
    one thread here."""
    before = torch.get_num_threads()
    yield
    found = torch.get_num_threads()
    torch.set_num_threads(before)
    assert found == before


@pytest.fixture(autouse=True, scope="module")
def nothing_left_behind():
    """What the tests of a module leave in this process would count against the limits of the next: 240 MB of one did.

    What stays is frozen: each collection looked through all tests and what they import, for 0.4 s, two fifths of the time.
    Nothing is thawed between modules: that took 2 s of each.
    """
    yield
    gc.collect()
    gc.freeze()
    Device().release_cached()


@pytest.fixture(autouse=True, scope="session")
def a_machine_that_is_measured_once():
    """What takes a fifth of each of a thousand short runs: the speeds, on which no test's plan hangs, and the steps that warm a
    process up. A simulated device's speeds stay its own, and commands in processes of their own measure."""
    from seqpart.plan import inputs  # not before, as below
    from seqpart.profile.machine import MEASURED, speeds_of
    from tests.machine import SPEEDS

    warm_up, warm = inputs.warm_up, set()

    def warm_up_once(device):
        if device.hardware is not None or (os.getpid(), device.kind) not in warm:
            warm_up(device)
            warm.add((os.getpid(), device.kind))

    inputs.warm_up = warm_up_once
    MEASURED.disk_probe = 1 << 20
    MEASURED.speeds = lambda device, *_: SPEEDS if device.hardware is None else speeds_of(device.hardware)


@pytest.fixture
def measured_machine(monkeypatch):
    """Plans that measure the machine, as users' do."""
    from seqpart.profile import machine  # not before, as above

    monkeypatch.setattr(machine.MEASURED, "speeds", machine.measure_speeds)


@pytest.fixture
def known_machine(monkeypatch):
    """Plans that do not measure the machine."""
    from tests import machine  # not before pytest has loaded what it runs: this brings all of planning

    machine.known(monkeypatch)


@pytest.fixture(scope="session")
def processes():
    """Runs that may be killed, and tests alone, begun from one process that has loaded everything, which takes 4 s."""
    from tests.resuming import Processes  # not before, as above

    made = Processes()
    yield made
    made.close()


def pytest_xdist_auto_num_workers(config):
    """Three, for two processors, since each waits for its disk a third of the time; none where files or tests are named."""
    return 0 if any(".py" in argument for argument in config.args) else 3


def pytest_report_header():
    versions = describe_versions()
    return f"torch {versions['torch']}, {torch.get_num_threads()} threads, GPU: {versions['gpu']}"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Each process must find the same tests: an address in the name of one, as a function's is, ended the whole run."""
    _leave_out_cases(items)
    wrong = [item.nodeid for item in items if " at 0x" in item.nodeid]
    if wrong:
        raise pytest.UsageError(f"{wrong[0]} has an address in its name: give ids=[...].")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """A test marked own_process runs in a Python of its own: what thousands of others leave in this one's heap, some hundred
    megabytes, comes and goes while a run is planned and measured, and would decide whether it keeps a tight limit."""
    if pyfuncitem.get_closest_marker("own_process") is None or OWN in os.environ:
        return None
    folder = pyfuncitem._request.getfixturevalue("tmp_path")
    status, said = pyfuncitem._request.getfixturevalue("processes").test(folder, pyfuncitem.nodeid)
    if status:
        pytest.fail(said, pytrace=False)
    if "1 passed" not in said:
        pytest.skip(said)
    return True


def pytest_collection_finish():
    gc.collect()
    gc.freeze()


def _leave_out_cases(items):
    """Of the cases of a test marked few(n), n from the first to the last stay as they are, and the others are marked slow."""
    cases = {}
    for item in items:
        if item.get_closest_marker("few") is not None:
            cases.setdefault((item.path, item.originalname), []).append(item)
    for found in cases.values():
        (count,) = found[0].get_closest_marker("few").args
        stay = {n * len(found) // count for n in range(min(count, len(found)))}
        for number in set(range(len(found))) - stay:
            found[number].add_marker(pytest.mark.slow)


def pytest_sessionfinish():
    gc.unfreeze()  # for libraries that look whether all of theirs has gone
