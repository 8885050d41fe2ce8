"""Finds the backend under test and gives each test fresh instances of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from pagefleet.conformance.cases import Case, case_named
from pagefleet.conformance.driver import Driver
from pagefleet.conformance.reference import tolerance
from pagefleet.conformance.target import find_target

if TYPE_CHECKING:
    from pagefleet.backend import Backend, BackendInfo, ModelSpec, Traits

    MakeBackend = Callable[[], Backend]
    MakeDriver = Callable[..., Driver]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes `dtype` or `block_size` runs for each one the backend offers."""
    if "dtype" in metafunc.fixturenames:
        metafunc.parametrize("dtype", find_target(metafunc.config)[0].traits.dtypes)
    if "block_size" in metafunc.fixturenames:
        sizes = find_target(metafunc.config)[0].traits.block_sizes
        metafunc.parametrize("block_size", (16, 5, 1) if sizes is None else sizes)


@pytest.fixture(scope="session")
def target(pytestconfig: pytest.Config) -> tuple[BackendInfo, int]:
    return find_target(pytestconfig)


@pytest.fixture(scope="session")
def traits(target: tuple[BackendInfo, int]) -> Traits:
    return target[0].traits


@pytest.fixture
def make_backend(target: tuple[BackendInfo, int]) -> Iterator[MakeBackend]:
    """A function that returns a fresh backend; the test's end closes it."""
    info, index = target
    made: list[Backend] = []

    def make() -> Backend:
        made.append(info.load(index))
        return made[-1]

    yield make
    for backend in made:
        backend.close()


@pytest.fixture
def make_driver(make_backend: MakeBackend, traits: Traits) -> MakeDriver:
    """A function that returns a driver with a poisoned cache.

    Unless told otherwise it takes the backend's most precise dtype and its smallest block size (4 where any will do),
    so that faults show and borders are crossed, and a cache that is small unless `num_tokens` have to fit.
    """

    def make(
        case: Case | str = "plain",
        *,
        dtype: str | None = None,
        block_size: int | None = None,
        num_tokens: int = 0,
    ) -> Driver:
        chosen = case_named(case) if isinstance(case, str) else case
        check_features(chosen.model, traits)
        dtype = dtype or min(traits.dtypes, key=tolerance)
        block_size = block_size or min(traits.block_sizes or (4,))
        num_blocks = 16 + max(64, num_tokens) // block_size
        driver = Driver.of_case(make_backend(), chosen, dtype, block_size, num_blocks)
        driver.poison()
        return driver

    return make


def check_features(model: ModelSpec, traits: Traits) -> None:
    """Skip the test if the backend says that it cannot run such a model."""
    lacking = [feature for feature in model.features if feature not in traits.model_features]
    if lacking:
        pytest.skip(f"Traits.model_features does not name {' and '.join(lacking)}")
