"""Writes the tables of docs/control-loop.md and docs/hooks.md, or checks that they are current."""

import argparse
import ast
import importlib
import inspect
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from fp8_safeguard.dashboards.causes import CAUSES, KIND_WORDS
from fp8_safeguard.hooks.whatif import VARIANTS
from fp8_safeguard.monitor.policyconfig import PolicyConfig
from fp8_safeguard.monitor.thresholds import PRESETS, Threshold
from fp8_safeguard.monitor.treatment import COSTS, catalogue

PAGES = tuple(Path(__file__).with_name(name) for name in ("control-loop.md", "hooks.md"))
SUITE = Path(__file__).parents[1] / "benchmarks" / "results" / "fault_suite.json"
BLOCK = re.compile(r"(<!-- (\w+): written by docs/tables\.py -->\n).*?(<!-- \2: end -->)", re.DOTALL)
NUMBERS = (
    "alerts",
    "history",
    "signals",
    "runwatch",
    "fp8causes",
    "othercauses",
    "attribution",
    "remedies",
    "treatment",
    "whatifs",
    "prescribing",
    "gate",
    "lastlayers",
    "outcomes",
    "baseline",
)
"""Modules of monitor/ whose constants decide something."""
_LEADS_TO = {
    "fallback": "a remedy, BF16 at the latest",
    "unjudged": "the same, where no recomputed GEMM judges",
    "scale": "a neutral scale first, then as `unjudged`",
    "pair": "a remedy, with its partner only",
    "none": "an alert only",
}


def page(text: str) -> str:
    """The page with its tables as the code has them."""

    def written(found: re.Match[str]) -> str:
        return f"{found[1]}{BLOCKS[found[2]]()}\n{found[3]}"

    return BLOCK.sub(written, text)


def thresholds() -> str:
    """Every rule of every preset."""
    parts = []
    for name, preset in PRESETS.items():
        places: dict[tuple[str, ...], list[str]] = {}
        for rule in preset.rules:
            places.setdefault(_rule(rule), []).append(_where(rule))
        rows = [(*cells[:2], ", ".join(where), *cells[2:]) for cells, where in places.items()]
        head = (
            "rule",
            "metric",
            "where",
            "watch",
            "act",
            "at once beyond",
            "leads to",
            "where the numbers come from",
        )
        parts.append(f"Preset `{name}`:\n\n{_table(head, rows)}")
    return "\n\n".join(parts)


def _where(rule: Threshold) -> str:
    return rule.gemm or " ".join(part for part in (rule.operand, rule.layout) if part) or "every slot"


def _rule(rule: Threshold) -> tuple[str, ...]:
    side = ">" if rule.above else "<"
    watch = _level(side, rule.watch, rule.watch_over_median)
    act = _level(side, rule.act, rule.act_over_median) if rule.act is not None else "–"
    at_once = "–" if rule.instant is None else f"{side} {rule.instant:g}"
    leads = _LEADS_TO[rule.remedy] if rule.act is not None else _LEADS_TO["none"]
    return f"`{rule.rule}`", f"`{rule.metric}`", watch, act, at_once, leads, rule.origin


def _level(side: str, fixed: float | None, over_median: float | None) -> str:
    parts = [f"{side} {fixed:g}"] if fixed is not None else []
    parts += [f"{side} {over_median:g} x own median"] if over_median is not None else []
    return ", and ".join(parts) or "–"


def causes() -> str:
    """Every cause with its fingerprint."""
    rows = [
        (f"`{name}`", KIND_WORDS[text.kind], text.fingerprint, text.helps) for name, text in CAUSES.items()
    ]
    return _table(("cause", "whose", "how it shows", "what helps"), rows)


def remedies() -> str:
    """What a measured remedy may be, the cheapest action first."""
    rows = []
    for action in COSTS:
        found = [remedy for remedy in catalogue() if remedy.action == action]
        shown = _power if action == "scale_multiplier" else _number
        values = list(dict.fromkeys(shown(remedy.value) for remedy in found))
        operands = list(dict.fromkeys(" + ".join(remedy.operands) or "layer" for remedy in found))
        if found:
            rows.append((f"`{action}`", ", ".join(values), ", ".join(operands)))
    return _table(("action", "values that what-ifs measure", "of"), rows)


def settings() -> str:
    """Every field of PolicyConfig with its default."""
    said = _docstrings(inspect.getsource(PolicyConfig), "PolicyConfig")
    rows = [(f"`{field.name}`", _default(field), said[field.name]) for field in fields(PolicyConfig)]
    return _table(("setting", "default", "what it does"), rows)


def numbers() -> str:
    """Every constant that decides something."""
    rows = []
    for name in NUMBERS:
        source = Path(str(importlib.import_module(f"fp8_safeguard.monitor.{name}").__file__))
        for constant, value, said in _constants(source.read_text(encoding="utf-8")):
            rows.append((f"`{name}.{constant}`", value, said))
    return _table(("number", "value", "what it is"), rows)


def variants() -> str:
    """Every what-if that the hooks can measure."""
    rows = [
        (f"`{name}`", variant.meaning, "yes" if variant.plannable else "no")
        for name, variant in VARIANTS.items()
    ]
    return _table(("variant", "what it measures", "a plan can ask for it"), rows)


def suite() -> str:
    """What the fault suite's kept results say against the loop."""
    if not SUITE.exists():
        return (
            "No results of the whole suite are kept yet. "
            "`python benchmarks/fault_suite.py --json benchmarks/results/fault_suite.json` writes them."
        )
    rows = [_missed(row) for row in _suite_rows() if _is_missed(row)]
    if not rows:
        return "Every goal of the kept results was reached."
    return _table(("case", "measured", "goal", "more"), rows)


def healthy() -> str:
    """How far the suite's healthy runs went, beside the level that stands against each value."""
    rows = [
        (
            str(row["case"]).removeprefix("healthy/"),
            _number(round(row["value"], 5)),
            _number(row["level"]),
            row["unit"],
        )
        for row in (_suite_rows() if SUITE.exists() else [])
        if "level" in row
    ]
    return _table(("value", "farthest of all healthy runs", "level", "unit"), rows)


def _suite_rows() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(SUITE.read_text(encoding="utf-8"))["rows"]
    return rows


def _is_missed(row: dict[str, Any]) -> bool:
    wrong_cause = str(row["case"]).endswith("/cause") and row["value"] is not None and row["value"] < 1
    return row.get("reached") is False or wrong_cause


def _missed(row: dict[str, Any]) -> tuple[str, ...]:
    value = "not at all" if row["value"] is None else f"{_number(row['value'])} {row['unit']}"
    if row.get("ratio") is not None:
        value += f", ratio {row['ratio']:.4f}"
    goal = "–" if row.get("goal") is None else _number(row["goal"])
    named = [str(name) for name in row.get("named") or ()]
    more = (
        f"named {', '.join(named)}; right: {', '.join(row['right_would_be'])}"
        if named
        else str(row.get("remark") or "")
    )
    return f"`{row['case']}`", value, goal, more


def _constants(source: str) -> Iterator[tuple[str, str, str]]:
    """(name, value, first sentences) of the public numbers of a module, in its order."""
    body = ast.parse(source).body
    for node, after in zip(body, [*body[1:], None], strict=True):
        names, value = _assigned(node)
        said = ast.get_docstring(ast.Module([after], [])) if isinstance(after, ast.Expr) else None
        for name, number in zip(names, value, strict=True):
            yield name, number, " ".join((said or "").split())


def _assigned(node: ast.stmt) -> tuple[list[str], list[str]]:
    if not isinstance(node, ast.Assign) or len(node.targets) != 1:
        return [], []
    targets, values = _elements(node.targets[0]), _elements(node.value)
    found = [
        (target.id, _literal(value))
        for target, value in zip(targets, values, strict=False)
        if isinstance(target, ast.Name) and re.fullmatch(r"[A-Z][A-Z0-9_]*", target.id)
    ]
    kept = [(name, value) for name, value in found if value is not None]
    return [name for name, _ in kept], [value for _, value in kept]


def _elements(node: ast.expr) -> list[ast.expr]:
    return node.elts if isinstance(node, ast.Tuple) else [node]


def _literal(node: ast.expr) -> str | None:
    """A number, or numbers by name, as text; None for anything else."""
    try:
        value = ast.literal_eval(node)
    except ValueError:
        return None
    if isinstance(value, dict) and value and all(isinstance(one, int | float) for one in value.values()):
        return ", ".join(f"{name} {one:g}" for name, one in value.items())
    return f"{value:g}" if isinstance(value, int | float) and not isinstance(value, bool) else None


def _docstrings(source: str, name: str) -> dict[str, str]:
    (made,) = (
        node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == name
    )
    return {
        node.target.id: " ".join(str(after.value.value).split())
        for node, after in zip(made.body, made.body[1:], strict=False)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
    }


def _default(field: Any) -> str:
    value = field.default_factory() if field.default is MISSING else field.default
    if value is None or value in ((), frozenset()):
        return "none"
    return f"`{value}`"


def _power(value: Any) -> str:
    """A multiplier as the power of two that it is."""
    return _number(value) if value == 1.0 else f"2^{math.log2(value):.0f}"


def _number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, int | float) else str(value)


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    names = list(head)
    cells = [[text.replace("|", "\\|") for text in row] for row in rows]
    lines = [names, ["---"] * len(names), *cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


BLOCKS: dict[str, Callable[[], str]] = {
    "thresholds": thresholds,
    "causes": causes,
    "remedies": remedies,
    "settings": settings,
    "numbers": numbers,
    "healthy": healthy,
    "suite": suite,
    "variants": variants,
}


def main() -> None:
    """Write the pages; with --check only say whether they are current."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; end with 1 where one is old")
    options = parser.parse_args()
    for file in PAGES:
        text = file.read_text(encoding="utf-8")
        new = page(text)
        if options.check and new != text:
            sys.exit(f"docs/{file.name} is not current: run make readme")
        if new != text:
            file.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
