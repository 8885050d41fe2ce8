"""Every model family against transformers: whole distributions, teacher-forced, on tiny checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pagefleet.conformance.checkpoints import TransformersModel, Variant, variants, write_checkpoint
from pagefleet.conformance.conftest import check_features
from pagefleet.conformance.driver import Driver
from pagefleet.conformance.target import find_plugins
from pagefleet.weights import open_checkpoint

if TYPE_CHECKING:
    from pagefleet.backend import Backend, Traits

    MakeBackend = Callable[[], Backend]
    Known = Callable[[Variant], tuple[Path, TransformersModel]]

pytestmark = pytest.mark.conformance_level("L3")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Variants of every family that is installed."""
    if "variant" in metafunc.fixturenames:
        found = list(variants(find_plugins().models()))
        metafunc.parametrize("variant", found, ids=[variant.name for variant in found])


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Known:
    """A function that returns a variant's checkpoint and transformers' model of it."""

    @cache
    def make(variant: Variant) -> tuple[Path, TransformersModel]:
        import transformers

        if not transformers.is_torch_available():
            pytest.skip("transformers' models need torch, which is not installed")
        try:
            variant.config()
        except ValueError:
            pytest.skip(f"transformers {transformers.__version__} does not know {variant.family.model_type}")
        folder = tmp_path_factory.mktemp(variant.name)
        write_checkpoint(variant, folder)
        return folder, TransformersModel(folder)

    return make


def test_logits_are_those_of_transformers(
    variant: Variant, dtype: str, known: Known, make_backend: MakeBackend, traits: Traits
) -> None:
    """Whole prompts, then chunks, then single tokens, beside each other."""
    folder, reference = known(variant)
    size = min(traits.block_sizes or (4,))
    with open_checkpoint(folder, families=[variant.family]) as checkpoint:
        check_features(checkpoint.spec, traits)
        driver = Driver(make_backend(), checkpoint.spec, checkpoint, reference, dtype, size, 16 + 128 // size)
        driver.poison()
        prompts = [driver.prompt(num_tokens) for num_tokens in (41, 1, 23, 16)]
        for limit in (23, 5, 1, 9):
            driver.step([(prompt, min(limit, prompt.pending)) for prompt in prompts if prompt.pending])
        driver.finish(prompts, chunk=1)
