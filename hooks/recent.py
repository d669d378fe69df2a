"""Remembers the last operands' statistics: q, k and v share an input."""

# Shapes: V = 29 TensorStats entries, E experts.

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor

Key = tuple[object, ...]

_KEPT = 4
"""Between the uses of one x in the backward comes the dy of each layer."""


class Recent:
    """Results for the tensors measured last in the step in progress; it keeps no tensor's memory."""

    def __init__(self) -> None:
        self._entries: list[tuple[Key, Any]] = []
        self.hits = 0
        """How often a result was found."""

    def get(self, x: Tensor, how: object, compute: Callable[[], Any]) -> Any:
        """compute(), or what it returned for the same unchanged memory and the same `how` a moment ago."""
        key = self.key(x, how)
        result = self.find(key)
        if result is None:
            result = compute()
            self.keep(key, result)
        return result

    def key(self, x: Tensor, how: object) -> Key | None:
        """What `find` and `keep` know a tensor by: its storage, place in it, dtype and version; None where nothing does."""
        if x.is_inference():
            return None  # has no version: nobody knows whether it was changed
        # A weak reference to a storage that is gone equals none to another one, wherever that lies.
        storage = weakref.ref(x.untyped_storage())
        return storage, x.storage_offset(), x.stride(), x.shape, x.dtype, x._version, how

    def find(self, key: Key | None) -> Any:
        """What was kept under that key, if its tensor's memory is still the same; else None."""
        for known, result in self._entries if key is not None else ():
            if known == key:
                self.hits += 1
                return result
        return None

    def keep(self, key: Key | None, result: Any) -> None:
        """Remember it."""
        if key is not None:
            self._entries = [(key, result), *self._entries[: _KEPT - 1]]

    def clear(self) -> None:
        """The step is over."""
        self._entries = []
