"""Errors of the kernels, all of them ValueErrors."""

# KernelError
#  +- UnknownOptionError    a layout, format, scale kind or precision that does not exist
#  +- OperandError          an operand whose shape, dtype or layout does not fit the call
#  +- OffsetsError          expert offsets that do not describe the rows


class KernelError(ValueError):
    """A call that the kernels cannot carry out, with the value seen and the way out."""


class UnknownOptionError(KernelError):
    """An option was given a value that does not exist."""

    def __init__(self, option: str, value: object, allowed: tuple[str, ...]) -> None:
        choices = ", ".join(repr(choice) for choice in allowed)
        super().__init__(f"{option}={value!r} does not exist: use one of {choices}")


class OperandError(KernelError):
    """An operand's shape, dtype or layout does not fit the call."""


class OffsetsError(KernelError):
    """Expert offsets do not describe the rows they came with."""


def require_option(option: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raise UnknownOptionError unless value is one of allowed."""
    if value not in allowed:
        raise UnknownOptionError(option, value, allowed)
