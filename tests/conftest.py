"""Rules for every test: one tier each, one seed, no use of unwritten memory."""

import os
from collections.abc import Iterator

import pytest

TIERS = frozenset({"cpu", "gpu", "manual"})

# Dozens of short services start in the tests; to compile for each would take longer than they run.
os.environ.setdefault("WORLDSTREAM_COMPILE", "off")
# cuBLAS asks for this before its first call where torch is told to be deterministic.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Check the tiers; without a GPU deselect its tests, so that the summary counts them."""
    wrong = [
        f"{item.nodeid}: {sorted(found) or 'none'}"
        for item in items
        if len(found := TIERS & {mark.name for mark in item.iter_markers()}) != 1
    ]
    if wrong:
        raise pytest.UsageError(
            "each test has exactly one of the marks cpu, gpu, manual; not so:\n" + "\n".join(wrong)
        )
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and not _has_cuda():
        config.hook.pytest_deselected(items=gpu_items)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]


@pytest.fixture(autouse=True)
def _deterministic_and_poisoned() -> Iterator[None]:
    """Seed torch; make it deterministic, which also fills torch.empty with NaN (ints: largest)."""
    import torch

    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()
