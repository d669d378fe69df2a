"""Remembers the last operands' statistics: q, k and v share an input."""

# Shapes: V = 29 TensorStats entries, E experts.

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

_KEPT = 4
"""Between the uses of one x in the backward comes the dy of each layer."""


class Recent:
    """Results for the tensors measured last in the step in progress; it keeps no tensor's memory."""

    def __init__(self) -> None:
        self._entries: list[tuple[Hashable, StorageWeakRef, Any]] = []
        self.hits = 0
        """How often a result was found."""

    def get(self, x: Tensor, how: Hashable, compute: Callable[[], Any]) -> Any:
        """compute(), or what it returned for the same unchanged memory and the same `how` a moment ago."""
        key = self.key(x, how)
        result = self.find(key)
        if result is None:
            result = compute()
            self.keep(key, x, result)
        return result

    def key(self, x: Tensor, how: Hashable) -> Hashable | None:
        """What `find` and `keep` know a tensor by: its storage, place in it, dtype and version; None where nothing does."""
        if x.is_inference():
            return None  # has no version: nobody knows whether it was changed
        storage = x.untyped_storage()._cdata
        return storage, x.storage_offset(), x.stride(), x.shape, x.dtype, x._version, how

    def find(self, key: Hashable | None) -> Any:
        """What was kept under that key, if its tensor's memory is still the same; else None."""
        for known, storage, result in self._entries if key is not None else ():
            if known == key and not storage.expired():  # type: ignore[no-untyped-call]
                self.hits += 1
                return result
        return None

    def keep(self, key: Hashable | None, x: Tensor, result: Any) -> None:
        """Remember it. The weak reference keeps the storage's identity from being given to another one, not its memory."""
        if key is not None:
            storage = StorageWeakRef(x.untyped_storage())  # type: ignore[no-untyped-call]
            self._entries = [(key, storage, result), *self._entries[: _KEPT - 1]]

    def clear(self) -> None:
        """The step is over."""
        self._entries = []
