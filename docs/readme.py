"""Write the generated parts of README.md (figures, module tree), or check that they are current."""

import argparse
import ast
import json
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]


def modules() -> dict[str, str]:
    """Path and opening sentence of every module of the project."""
    return {
        path.relative_to(ROOT).as_posix(): first_sentence(path)
        for package in packages()
        for path in sorted((ROOT / package).glob("*.py"))
    }


def packages() -> list[str]:
    """The folders that pyproject.toml installs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = project["tool"]["setuptools"]["packages"]
    return [name.removeprefix("fp8_safeguard.").replace(".", "/") for name in listed]


def first_sentence(path: Path) -> str:
    """The first line of a module's docstring; empty where there is none."""
    return (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]


def tree() -> Iterator[str]:
    """The module tree, indented as a code block."""
    found = modules()
    width = max(len(path) for path in found) + 2
    for path, sentence in found.items():
        yield f"    {path:<{width}}{sentence}"


def figures() -> Iterator[str]:
    """A Markdown table of the figures in benchmarks/results/ that have a goal, or a control of their own; the files have all."""
    yield "| Benchmark | Case | Result | Interval | Goal | Control (A against A) |"
    yield "|---|---|---|---|---|---|"
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        report = json.loads(path.read_text())
        for row in report["rows"]:
            if row["goal"] is None and "control" not in row:
                continue
            control = report["controls"][row["control"]] if "control" in row else report["control"]
            noise = f"{control['ratio']:.3f} [{control['low']:.3f}, {control['high']:.3f}]"
            figure = (
                f"{row['ratio']:.3f}x" if row["ratio"] is not None else f"{row['value']:.4g} {row['unit']}"
            )
            interval = "" if row["low"] is None else f"{row['low']:.3f} to {row['high']:.3f}"
            goal = "" if row["goal"] is None else f"{row['goal']:g}"
            yield f"| `{report['benchmark']}` | `{row['case']}` | {figure} | {interval} | {goal} | {noise} |"


def current(readme: str) -> str:
    """The README with its generated parts as they should be."""
    for name, lines in (("figures", figures()), ("modules", tree())):
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        before, rest = readme.split(begin)
        readme = before + begin + "\n\n" + "\n".join(lines) + "\n\n" + end + rest.split(end)[1]
    return readme


def main() -> int:
    """Exit code 1 with --check where README.md is not current."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing")
    check = parser.parse_args().check
    path = ROOT / "README.md"
    stands, wanted = path.read_text(), current(path.read_text())
    if check:
        return int(stands != wanted)
    path.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
