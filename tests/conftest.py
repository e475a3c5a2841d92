"""What every test shares: a fixed seed, and a report that names torch and the device."""

import pytest

from seqpart.device import describe_versions  # before torch: seqpart sets what torch reads when it loads

import torch  # isort: skip


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def pytest_report_header():
    versions = describe_versions()
    return f"torch {versions['torch']}, {torch.get_num_threads()} threads, GPU: {versions['gpu']}"
