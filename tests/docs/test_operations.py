"""The operations page names every setting with its default, and what it quotes exists."""

import ast
import os
import random
import re
import shutil
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx2
import pytest
from typer.testing import CliRunner

from fp8_safeguard.cli.main import app
from fp8_safeguard.server.serve import running_server
from fp8_safeguard.server.settings import Settings

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "operations.md").read_text()
VARIABLE = re.compile(r"FP8_SAFEGUARD_[A-Z]+(?:_[A-Z]+)*")


def sources(*folders: str) -> str:
    """The text of the modules of some packages, strings that go over lines joined."""
    text = "\n".join(path.read_text() for folder in folders for path in sorted((ROOT / folder).rglob("*.py")))
    return re.sub(r'"\s*\n\s*f?"', "", text)


def blocks(kind: str) -> list[str]:
    """The code blocks of one kind."""
    return re.findall(rf"^```{kind}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def test_every_setting_stands_there_with_its_default() -> None:
    rows = dict(
        re.findall(r"^\| `FP8_SAFEGUARD_(\w+)` \| (.*?) \| ", PAGE.split("Of the client")[0], re.MULTILINE)
    )
    defaults = {
        name.upper(): "none" if field.get_default(call_default_factory=True) is None
        else f"`{field.get_default(call_default_factory=True)}`"
        for name, field in Settings.model_fields.items()
        if name not in ("server", "spool_dir")  # the client's, in its own table
    }  # fmt: skip
    assert rows == defaults


def test_every_variable_that_the_code_reads_is_explained() -> None:
    read = set(VARIABLE.findall(sources("hooks", "kernels", "trainer", "cli", "server", "monitor")))
    assert read <= set(re.findall(r"^\| `(FP8_SAFEGUARD_\w+)` \|", PAGE, re.MULTILINE))


KINDS: tuple[dict[str, str], ...] = (
    {"operand": "x", "layout": "row"},
    {"operand": "x", "layout": "col"},
    {"operand": "w", "layout": "tile"},
    {"operand": "dy", "layout": "row"},
    {"operand": "dy", "layout": "col"},
    {"gemm": "fprop"},
    {"gemm": "dgrad"},
    {"gemm": "wgrad"},
)
ONLY_OF_OPERANDS = ("zeros", "underflow", "saturated", "rows", "rows_flushed", "sum_4th", "tile_sqnr_hist")


def sample(step: int, layers: int) -> dict[str, Any]:
    """A healthy sample of a model with that many layers, its numbers as uneven as measured ones."""
    draw = random.Random(step)
    slots = [{"layer": f"blocks.{n}.mlp.up", **kind} for n in range(layers) for kind in KINDS]
    rows = []
    for slot in slots:
        noise = {name: draw.uniform(0.9, 1.1) for name in ("amax", "sum_sq", "sum_4th")}
        row: dict[str, Any] = {"count": 65536, "zeros": draw.randrange(40), "underflow": 0, "saturated": 0}
        row |= {"nan": 0, "inf": 0, "rows": 64, "rows_flushed": 0, "amax": 4.5 * noise["amax"]}
        row |= {"sum_sq": 65536 * noise["sum_sq"], "sum_sq_q": 65540 * noise["sum_sq"]}
        row |= {"sum_sq_err": 43.3 * noise["sum_sq"], "sum_4th": 196608 * noise["sum_4th"]}
        row["tile_sqnr_hist"] = [0] * 11 + [draw.randrange(1, 60) for _ in range(4)] + [0]
        rows.append({**row, **dict.fromkeys(ONLY_OF_OPERANDS)} if "gemm" in slot else row)
    header = {
        "schema": 1,
        "batch_id": f"b{step}",
        "attempt": {"id": "0"},
        "group": "0",
        "groups": 1,
        "step": step,
    }
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    return {**header, "slots": [{"index": n, **slot} for n, slot in enumerate(slots)], "columns": columns}


LINES = re.findall(
    r"^\| `(.*…?.*)` \| ", PAGE.split("## Log lines")[1].split("## Troubleshooting")[0], re.MULTILINE
)


@pytest.mark.parametrize("line", LINES)
def test_every_log_line_that_is_explained_is_one(line: str) -> None:
    said = sources("hooks", "server")
    pieces = [piece for piece in re.split(r"\s*…\s*", line) if len(piece) > 3]
    assert pieces
    for piece in pieces:
        assert piece.strip(" ():;,") in said, piece


def written(node: ast.expr, constants: dict[str, str]) -> str | None:
    """A text that stands in the code, also under a name of its module."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return constants.get(node.id) if isinstance(node, ast.Name) else None


def warnings_of(path: Path) -> Iterator[str]:
    """What a module logs as a warning or an error; what varies is an ellipsis."""
    tree = ast.parse(path.read_text())
    constants = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        called = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if called and node.func.attr in ("warning", "error"):
            texts = (written(argument, constants) for argument in node.args[:2])
            said = next((text for text in texts if text and "%" in text), None)
            if said is not None:
                yield re.sub(r"%(\.\d)?[sdgf]", "…", said)


def test_every_warning_is_explained() -> None:
    modules = [path for folder in ("hooks", "server") for path in sorted((ROOT / folder).rglob("*.py"))]
    said = {text for path in modules for text in warnings_of(path)}
    assert len(said) > 15
    patterns = [re.compile(".*".join(map(re.escape, line.split("…"))), re.DOTALL) for line in LINES]
    missing = [text for text in said if not any(pattern.fullmatch(text) for pattern in patterns)]
    assert not missing


def test_the_commands_are_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FP8_SAFEGUARD_DATABASE_URL", f"sqlite:///{tmp_path}/fp8-safeguard.db")
    commands = [line for block in blocks("console") for line in block.splitlines()]
    assert len(commands) >= 8
    for line in commands:
        program, *arguments = line.removeprefix("$ ").split()
        assert program == "fp8-safeguard"
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, f"{line}\n{result.output}"


def test_promtool_takes_the_configuration_and_the_rules(tmp_path: Path) -> None:
    if shutil.which("promtool") is None and os.environ.get("CI") != "true":
        pytest.skip("promtool is missing: install Debian's prometheus")
    configuration, rules = blocks("yaml")
    for name, text, what in (("c.yml", configuration, "config"), ("r.yml", rules, "rules")):
        file = tmp_path / name
        # The token's file is the reader's own.
        file.write_text(text.replace("/etc/prometheus/fp8-safeguard.token", str(tmp_path / "token")))
        (tmp_path / "token").touch()
        ran = subprocess.run(["promtool", "check", what, str(file)], capture_output=True, text=True)
        assert ran.returncode == 0, ran.stdout + ran.stderr


def test_the_rules_use_metrics_that_exist(tmp_path: Path) -> None:
    with running_server(Settings(database_url=f"sqlite:///{tmp_path}/x.db")) as url:
        exposed = set(re.findall(r"# TYPE (\w+) ", httpx2.get(f"{url}/metrics").text))
    used = set(re.findall(r"\bfp8_safeguard_\w+", PAGE))
    assert used
    assert used <= exposed


def used_bytes(database: Path, steps: range, layers: int) -> int:
    """Bytes that a database uses after these steps, its log emptied and free pages left out."""
    with running_server(Settings(database_url=f"sqlite:///{database}")) as url:
        for step in steps:
            answer = httpx2.post(f"{url}/api/v1/runs/r/samples", json=sample(step, layers), timeout=60)
            assert answer.status_code == 200, answer.text
    log = database.with_name(f"{database.name}-wal")
    assert not log.exists() or not log.stat().st_size
    with closing(sqlite3.connect(database)) as conn:
        pages, free, size = (
            conn.execute(f"pragma {name}").fetchone()[0]
            for name in ("page_count", "freelist_count", "page_size")
        )
    return int((pages - free) * size)


def test_the_storage_figures_are_what_is_measured(tmp_path: Path) -> None:
    """What each further sample adds, and what an attempt keeps once; the page's figures are good to a fifth."""
    (each,), (once,) = (
        re.findall(rf"[Aa]bout (\d+) bytes a slot{end}", PAGE) for end in (" and sample", r"\. Measure")
    )
    layers, slots, before, after = 25, 25 * len(KINDS), 5, 20
    database = tmp_path / "store.db"
    first = used_bytes(database, range(before), layers)
    grown = used_bytes(database, range(before, after), layers) - first
    assert grown / ((after - before) * slots) == pytest.approx(int(each), rel=0.2)
    with closing(sqlite3.connect(database)) as conn:
        kept = conn.execute("select sum(length(policy_state)) from attempts").fetchone()[0]
    assert kept / slots == pytest.approx(int(once), rel=0.2)
