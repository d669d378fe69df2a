"""Mistakes of the caller that attach and the guard refuse."""


class HookError(ValueError):
    """Root of what `fp8_safeguard.hooks` raises; the message says the value seen and the way out."""


class OptionError(HookError):
    """An argument of attach() or of a guard's method is outside what is allowed."""


class AlreadyAttachedError(HookError):
    """The model, or a part of it, carries the hooks of another guard."""
