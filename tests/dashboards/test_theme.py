"""Colours: one source for figures and style sheet, readable on their background."""

import re
from importlib import resources

import pytest

from fp8_safeguard.dashboards.theme import THEMES, Theme, UnknownThemeError, escape, get_theme

NAMES = (
    "surface",
    "border",
    "text",
    "muted",
    "accent",
    "healthy",
    "watch",
    "unstable",
    "fallback",
    "stale",
    "nonfinite",
)


def css_variables(theme: str) -> dict[str, str]:
    css = (resources.files("fp8_safeguard.dashboards") / "static" / "style.css").read_text("utf-8")
    selector = r":root" if theme == "light" else r':root\[data-theme="dark"\]'
    block = re.search(selector + r"\s*\{(.*?)\}", css, re.DOTALL)
    assert block is not None
    return dict(re.findall(r"--([a-z]+):\s*(#[0-9a-f]{6});", block[1]))


@pytest.mark.parametrize("theme", sorted(THEMES))
def test_figures_and_style_sheet_use_the_same_colours(theme: str) -> None:
    css = css_variables(theme)
    assert {name: css[name] for name in NAMES} == {name: getattr(THEMES[theme], name) for name in NAMES}


def contrast(one: str, other: str) -> float:
    """WCAG 2 contrast ratio."""
    high, low = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def _luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("theme", THEMES.values(), ids=lambda theme: theme.name)
@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("surface", "border", "nonfinite")])
def test_text_colours_reach_wcag_aa(theme: Theme, name: str) -> None:
    assert contrast(getattr(theme, name), theme.surface) >= 4.5


def test_an_unknown_theme_names_the_known_ones() -> None:
    with pytest.raises(UnknownThemeError, match="dark, light"):
        get_theme("sepia")


def test_escape_leaves_no_markup() -> None:
    assert escape("a<b>&c") == "a&lt;b&gt;&amp;c"
