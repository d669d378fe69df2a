"""How each metric is shown: name, unit, range, direction."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class MetricView:
    """Display of one metric; the numbers themselves are defined in monitor.stats."""

    label: str
    unit: str = ""
    definition: str = ""
    percent: bool = False
    """Shown in percent; the values stay ratios."""
    bounds: tuple[float, float] | None = None
    """Fixed colour range on a linear scale; None takes it from the data."""
    log_bounds: tuple[float, float] | None = None
    """Fixed colour range on a log scale, from just under the format's noise floor upwards."""
    worse_when_low: bool = False

    @property
    def direction(self) -> str:
        """Which way is bad, in words."""
        return "lower is worse" if self.worse_when_low else "higher is worse"

    @property
    def hover_format(self) -> str:
        """d3 format of one value."""
        return ".3~p" if self.percent else ".4~g"


def _ratio(label: str, definition: str, low: float) -> MetricView:
    return MetricView(
        label=label, definition=definition, percent=True, bounds=(0.0, 1.0), log_bounds=(low, 1.0)
    )


# Healthy E4M3 with [1,128] blocks reads about 3.5e-4 in distortion, 2.6 % in GEMM error and 1e-5 in underflow:
# each log range starts a little below that, so healthy is one quiet colour.
VIEWS: dict[str, MetricView] = {
    "gradient_distortion": MetricView(
        label="gradient distortion",
        unit="(1 − cosine)",
        definition="worst 1 − cosine of dy, dgrad, wgrad",
        bounds=(0.0, 1.0),
        log_bounds=(1e-4, 1.0),
    ),
    "cosine_distortion": MetricView(
        label="cosine distortion",
        unit="(1 − cosine)",
        definition="1 − cosine of the tensor and its FP8 image",
        bounds=(0.0, 1.0),
        log_bounds=(1e-4, 1.0),
    ),
    "relative_error": _ratio(
        "GEMM error", "‖FP8 − high precision‖ over ‖high precision‖", 1e-2
    ),
    "underflow_ratio": _ratio("underflow", "non-zero elements that FP8 turned into zero, over all", 1e-6),
    "saturation_ratio": _ratio("saturation", "finite elements beyond the largest FP8 value, over all", 1e-6),
    "zero_ratio": _ratio("zeros", "elements that are zero after quantisation, over all", 1e-6),
    "rows_flushed_ratio": _ratio("flushed rows", "non-zero rows that went to zero whole, over all", 1e-6),
    "cosine": MetricView(label="cosine", definition="of the tensor and its FP8 image; 1 is a perfect match",
                         bounds=(0.0, 1.0), worse_when_low=True),
    "sqnr_db": MetricView(label="SQNR", unit="dB", definition="10 log₁₀ of signal over quantisation error",
                          bounds=(0.0, 40.0), worse_when_low=True),
    "tile_sqnr_p01_db": MetricView(label="SQNR, worst 1 % of blocks", unit="dB", bounds=(0.0, 40.0),
                                   definition="SQNR that 99 % of the quantisation blocks reach", worse_when_low=True),
    "mse": MetricView(label="mean squared error", definition="Σ(x − xq)² over the number of finite elements"),
    "kurtosis": MetricView(label="kurtosis", definition="n Σx⁴ / (Σx²)²; a Gaussian has 3", log_bounds=(1.0, 1e5)),
    "amax": MetricView(label="amax", definition="largest finite magnitude of the tensor"),
    "nonfinite_count": MetricView(label="NaN and Inf", unit="elements", definition="NaN and Inf elements of the tensor"),
    "sum_sq": MetricView(label="sum of squares", definition="Σx² over finite elements"),
    "sum_sq_q": MetricView(label="sum of squares in FP8", definition="Σxq² over finite elements"),
    "sum_sq_err": MetricView(label="sum of squared errors", definition="Σ(x − xq)² over finite elements"),
    "sum_4th": MetricView(label="sum of fourth powers", definition="Σx⁴ over finite elements"),
    "count": MetricView(label="count", definition="elements of the tensor, without padding"),
    "zeros": MetricView(label="zeros", definition="elements that are zero after quantisation"),
    "underflow": MetricView(label="underflow", definition="non-zero elements that FP8 turned into zero"),
    "saturated": MetricView(label="saturated", definition="finite elements beyond the largest FP8 value"),
    "nan": MetricView(label="nan", definition="NaN elements of the tensor"),
    "inf": MetricView(label="inf", definition="infinite elements of the tensor"),
    "rows": MetricView(label="rows", definition="rows along the last dimension: tokens of x and dy, output features of w"),
    "rows_flushed": MetricView(label="rows flushed", definition="non-zero rows that went to zero whole"),
    "loss": MetricView(label="loss", definition="training loss, as the trainer logs it"),
    "gradient_norm": MetricView(label="gradient norm", definition="norm of all gradients, as the trainer logs it"),
}  # fmt: skip

PAGE_METRICS = (
    "gradient_distortion",
    "relative_error",
    "underflow_ratio",
    "saturation_ratio",
    "cosine_distortion",
    "sqnr_db",
    "tile_sqnr_p01_db",
    "zero_ratio",
    "rows_flushed_ratio",
    "amax",
    "kurtosis",
    "nonfinite_count",
)
"""The metrics that the run page offers, in its order."""


def metric_view(metric: str) -> MetricView:
    """How to show `metric`; a raw column without an entry shows under its own name."""
    return VIEWS.get(metric) or MetricView(label=metric.replace("_", " "))


LOG_WITHOUT_RANGE = ("amax", "nonfinite_count")
"""Metrics that span decades without a range of their own."""


def default_scale(metric: str) -> str:
    """The colour scale a page opens `metric` with: "log" for what spans decades."""
    return "log" if metric_view(metric).log_bounds or metric in LOG_WITHOUT_RANGE else "linear"


def format_limit(threshold: float | None, view: MetricView) -> str:
    """A limit with the side on which a value is good: "≤ 0.5 %" or "≥ 28.5 dB"."""
    if threshold is None:
        return "–"
    return f"{'≥' if view.worse_when_low else '≤'} {format_value(threshold, view)}"


def format_value(value: float | None, view: MetricView) -> str:
    """One number for people: three significant digits, a percent sign or unit, a dash when not sampled."""
    if value is None:
        return "–"
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if view.percent:
        return f"{short_number(value * 100)} %"
    return f"{short_number(value)} dB" if view.unit == "dB" else short_number(value)


def short_number(value: float, digits: int = 3) -> str:
    """A few significant digits, plain where that is short and with an exponent where it is not."""
    if value == 0:
        return "0"
    if 0.999e-4 <= abs(value) < 1e5:
        return f"{value:.{digits}g}" if abs(value) < 10**digits else f"{value:,.0f}"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}".replace("-", "−")
