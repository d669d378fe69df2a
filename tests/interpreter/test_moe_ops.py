"""The fused operations can stand wherever the plain ones do."""

import inspect

import pytest

from fp8_safeguard.kernels.moe import eager, triton_ops


@pytest.mark.parametrize("name", triton_ops.__all__)
def test_same_arguments_in_the_same_order(name: str) -> None:
    """What a fused operation takes besides is optional and keyword-only."""
    fused = dict(inspect.signature(getattr(triton_ops, name)).parameters)
    for expected in inspect.signature(getattr(eager, name)).parameters.values():
        got = fused.pop(expected.name)
        assert got.kind == expected.kind
        assert got.annotation == expected.annotation
    for extra in fused.values():
        assert extra.kind == inspect.Parameter.KEYWORD_ONLY
        assert extra.default is not inspect.Parameter.empty
