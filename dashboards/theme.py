"""Colours and plot geometry that figures and pages share."""

from dataclasses import dataclass
from typing import Any

LEFT_MARGIN_PX = 184
RIGHT_MARGIN_PX = 112
FONT_FAMILY = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif'


@dataclass(frozen=True, kw_only=True)
class Theme:
    """One colour scheme; the same names are CSS variables in static/style.css."""

    name: str
    surface: str
    border: str
    text: str
    muted: str
    accent: str
    healthy: str
    watch: str
    unstable: str
    fallback: str
    stale: str
    nonfinite: str
    """Absent from the colour scale, so that a NaN or Inf mark is never taken for a value."""
    colorscale: tuple[tuple[float, str], ...]
    """Lightness rises or falls all the way, so the order survives colour blindness and grey print."""


# Healthy recedes into the page and bad stands out: the dark scale starts dark, the light scale starts light.
DARK = Theme(
    name="dark",
    surface="#141920",
    border="#28303b",
    text="#e6eaf0",
    muted="#98a4b5",
    accent="#6ea8fe",
    healthy="#45c08f",
    watch="#e5b445",
    unstable="#ff7b6b",
    fallback="#b79cff",
    stale="#98a4b5",
    nonfinite="#2ee6ff",
    colorscale=(
        (0.0, "#1b2140"),
        (0.15, "#31215f"),
        (0.3, "#5b2177"),
        (0.45, "#902c78"),
        (0.6, "#c8445f"),
        (0.75, "#ee7440"),
        (0.88, "#fbb43d"),
        (1.0, "#fcfbb0"),
    ),
)
LIGHT = Theme(
    name="light",
    surface="#ffffff",
    border="#dde2e9",
    text="#18212c",
    muted="#566271",
    accent="#2160c4",
    healthy="#137a55",
    watch="#8a6000",
    unstable="#c02f1d",
    fallback="#6a40c9",
    stale="#566271",
    nonfinite="#d9480f",
    colorscale=(
        (0.0, "#edf2f8"),
        (0.15, "#d5e1f0"),
        (0.3, "#b3c9e4"),
        (0.45, "#95a8d6"),
        (0.6, "#8780c3"),
        (0.75, "#85519f"),
        (0.88, "#79207c"),
        (1.0, "#3d0040"),
    ),
)
THEMES = {theme.name: theme for theme in (LIGHT, DARK)}


class UnknownThemeError(ValueError):
    """A colour scheme that does not exist."""

    def __init__(self, name: str) -> None:
        super().__init__(f"theme {name!r} is unknown; use one of {', '.join(sorted(THEMES))}")


def get_theme(name: str) -> Theme:
    """The colour scheme `name`: "light" or "dark"."""
    if name not in THEMES:
        raise UnknownThemeError(name)
    return THEMES[name]


def base_layout(theme: Theme, *, top_px: int, bottom_px: int) -> dict[str, Any]:
    """Layout that every figure starts from; equal side margins keep the step axes aligned."""
    return {
        "margin": {"l": LEFT_MARGIN_PX, "r": RIGHT_MARGIN_PX, "t": top_px, "b": bottom_px},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": FONT_FAMILY, "size": 11, "color": theme.muted},
        "hoverlabel": {
            "bgcolor": theme.surface,
            "bordercolor": theme.border,
            "font": {"family": FONT_FAMILY, "size": 12, "color": theme.text},
            "align": "left",
            "namelength": -1,
        },
        "hovermode": "closest",
        "dragmode": "zoom",
        "showlegend": False,
        "uirevision": "keep",
    }


def step_axis(theme: Theme, *, labels: bool) -> dict[str, Any]:
    """The x axis of optimizer steps, with tick labels only on the lowest figure of a stack."""
    return {
        "title": {"text": "optimizer step", "standoff": 4} if labels else None,
        "showticklabels": labels,
        "tickformat": ",d",
        "showgrid": False,
        "zeroline": False,
        "linecolor": theme.border,
        "automargin": False,
    }


def value_axis(theme: Theme, title: str, colour: str) -> dict[str, Any]:
    """A y axis that stays put while the step axis zooms."""
    return {
        "title": {"text": title, "standoff": 10, "font": {"color": colour}},
        "fixedrange": True,
        "gridcolor": theme.border,
        "zeroline": False,
        "automargin": False,
        "ticklabelstandoff": 6,
        "tickmode": "auto",
        "nticks": 4,
    }


def empty_note(theme: Theme, text: str) -> dict[str, Any]:
    """An annotation for the middle of a figure that has nothing to draw."""
    return {
        "text": text,
        "xref": "paper",
        "yref": "paper",
        "x": 0.5,
        "y": 0.5,
        "showarrow": False,
        "font": {"size": 13, "color": theme.muted},
    }


def escape(text: object) -> str:
    """Text made safe for Plotly, which reads <a>, <b>, <br> in labels as markup."""
    return str(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
