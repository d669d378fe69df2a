"""Write the README's table of figures from benchmarks/results/, or check that it is current."""

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"


def rows() -> list[str]:
    lines = [
        "| Benchmark | Case | Result | 95 % interval | Goal | Control (A against A) |",
        "|---|---|---|---|---|---|",
    ]
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        report = json.loads(path.read_text())
        control = report["control"]
        noise = f"{control['ratio']:.3f} [{control['low']:.3f}, {control['high']:.3f}]"
        for row in report["rows"]:
            figure = (
                f"{row['ratio']:.3f}x" if row["ratio"] is not None else f"{row['value']:.4g} {row['unit']}"
            )
            interval = f"{row['low']:.3f} to {row['high']:.3f}" if row["low"] is not None else ""
            goal = "" if row["goal"] is None else str(row["goal"])
            lines.append(
                f"| `{report['benchmark']}` | `{row['case']}` | {figure} | {interval} | {goal} | {noise} |"
            )
    return lines


def with_table(readme: str) -> str:
    before, rest = readme.split(BEGIN)
    _, after = rest.split(END)
    return before + BEGIN + "\n" + "\n".join(rows()) + "\n" + END + after


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit 1 when the README is not current")
    check = parser.parse_args().check
    path = ROOT / "README.md"
    current = path.read_text()
    wanted = with_table(current)
    if check:
        if current != wanted:
            print("README.md is not current: run python benchmarks/readme_table.py", file=sys.stderr)
        return int(current != wanted)
    path.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
