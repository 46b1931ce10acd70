"""Real models of Hugging Face and timm, small: trained as by one process. They need `make test-zoo`."""

import pytest

pytest.importorskip("transformers", reason="needs transformers: make test-zoo")

from test_zoo import check  # noqa: E402
from zoo_real import KINDS, WITHOUT_TIMM  # noqa: E402
from zoo_techniques import OURS, one_process  # noqa: E402


@pytest.fixture(scope="module")
def expected():
    return {name: one_process(kind) for name, kind in KINDS.items()}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("technique", [name for name in OURS if not name.startswith("pipeline")])
def test_each_model_is_trained_as_by_one_process(technique, expected):
    check(technique, 2, expected, KINDS)


def test_models_of_timm_are_here():
    if WITHOUT_TIMM:
        pytest.skip(WITHOUT_TIMM)
    assert any(name.startswith("timm") for name in KINDS)
