"""Memory in huge pages: tensors that neither overlap nor move, freed when no tensor uses them."""

from __future__ import annotations

import pytest
import torch

from headrace_engine.runner.native import huge_pages
from headrace_engine.runner.native.huge_pages import HugePages


def test_tensors_do_not_overlap_and_begin_where_vectors_can() -> None:
    pages = HugePages()
    shapes = [(3,), (1 << 20, 5), (7, 11, 13), (40 << 20,), (1,)]  # some in one region, some in another
    tensors = [pages.empty(shape, torch.bfloat16).fill_(number) for number, shape in enumerate(shapes)]
    for number, (shape, tensor) in enumerate(zip(shapes, tensors, strict=True)):
        assert tensor.shape == shape
        assert tensor.data_ptr() % 64 == 0
        assert tensor.is_contiguous()
        assert bool((tensor == number).all())


def test_a_tensor_without_elements_needs_no_memory() -> None:
    assert HugePages().empty((0, 5), torch.float32).shape == (0, 5)


def test_a_region_goes_with_its_last_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "_REGION", 1 << 20)

    def resident() -> int:
        with open("/proc/self/statm") as statm:  # noqa: PTH123
            return int(statm.read().split()[1]) * 4096

    pages = HugePages()
    before = resident()
    tensor = pages.empty((64 << 20,), torch.uint8)
    assert resident() - before < 32 << 20  # pages are touched on first use only
    tensor.fill_(1)
    assert resident() - before >= 64 << 20
    del tensor
    pages.empty((2 << 20,), torch.uint8)  # which needs another region
    assert resident() - before < 32 << 20


def test_what_the_system_does_not_have_is_an_error_with_its_size() -> None:
    with pytest.raises(MemoryError, match="1099511627776 MiB cannot be allocated"):
        HugePages().empty((1 << 60,), torch.uint8)
