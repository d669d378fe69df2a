"""Writes the what-ifs of docs/hooks.md, or checks that they are current."""

import argparse
import re
import sys
from pathlib import Path

from fp8_safeguard.hooks.whatif import VARIANTS

PAGE = Path(__file__).parent / "hooks.md"
BLOCK = re.compile(
    r"(<!-- variants: written by docs/variants\.py -->\n).*?(<!-- variants: end -->)", re.DOTALL
)


def page(text: str) -> str:
    """The page with the table as the code has it."""
    rows = [
        f"| `{name}` | {variant.meaning} | {'yes' if variant.plannable else 'no'} |"
        for name, variant in VARIANTS.items()
    ]
    table = "\n".join(["| variant | what it measures | a plan can ask for it |", "|---|---|---|", *rows])
    return BLOCK.sub(lambda found: f"{found[1]}{table}\n{found[2]}", text)


def main() -> None:
    """Write the page; with --check only say whether it is current."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; end with 1 where it is old")
    options = parser.parse_args()
    text = PAGE.read_text(encoding="utf-8")
    new = page(text)
    if options.check:
        sys.exit(0 if new == text else "docs/hooks.md is not current: run make readme")
    PAGE.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
