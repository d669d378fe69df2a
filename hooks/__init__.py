"""Attaches to any PyTorch trainer: measures, reports and applies the plan."""

from fp8_safeguard.hooks.attach import attach
from fp8_safeguard.hooks.errors import AlreadyAttachedError, HookError, OptionError
from fp8_safeguard.hooks.guard import Guard

__all__ = ["AlreadyAttachedError", "Guard", "HookError", "OptionError", "attach"]
