"""``docs/h200.md``: its links lead somewhere, its commands exist, its tables agree with each other."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from pathlib import Path

import pytest

from autotune.engines.environment import Mode
from autotune.engines.runtime import Runtime
from autotune.router import Router
from autotune.table.load import load_table
from benchmarks.corner_list import CORNERS
from benchmarks.live_faults import CASES, COLUMNS, Case, refusal
from tests.console import cli

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
TEXT = (DOCS / "h200.md").read_text()
TABLES = "tuned_configs/nvidia-h200"
ROUTES = ("xqa-decode", "fmha-v2", "fa2", "fa3", "fa2-decode")
KINDS = ("wrong_output", "illegal_access", "nan_leak", "unwritten_output", "launch_error")


def anchors(page: Path) -> set[str]:
    """The headings of a page, as a Markdown host links to them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}


def rows(first: str) -> list[list[str]]:
    """The cells of the table whose head begins with ``first``, without its head."""
    lines = TEXT[TEXT.index(f"\n| {first} |") + 1 :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def commands() -> list[list[str]]:
    """What the page tells to type, in words; ``T`` is what the page says it is."""
    quoted = re.findall(r"`((?:python|autotune) [^`]+)`", TEXT)
    return [shlex.split(re.sub(r"\bT\.", f"{TABLES}.", each)) for each in quoted]


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.stem)
def test_every_link_of_every_page_leads_somewhere(page: Path) -> None:
    found = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    for link in found:
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_the_page_is_linked() -> None:
    for name in ("safety.md", "engines.md"):
        assert "(h200.md" in (DOCS / name).read_text()


def test_every_command_is_one() -> None:
    scripts = {}
    for tool, script, *words in commands():
        if tool == "autotune":
            continue
        scripts[script] = source = (ROOT / script).read_text()
        for word in words:
            if word.startswith("--"):
                assert f'"{word}"' in source, f"{script} {word}"
            elif word.endswith(".yaml"):
                assert (ROOT / word).exists(), word
    assert {Path(script).stem for script in scripts} == {
        *("live_faults", "corners", "soak", "false_accusations", "guard_cost", "engine_loop"),
        *("draft_extend_story", "fault_demo"),
    }


def test_what_explain_is_quoted_with_is_what_it_prints() -> None:
    (command,) = [words for words in commands() if words[:2] == ["autotune", "explain"]]
    done = cli(*(ROOT / word if word.endswith(".yaml") else word for word in command[1:]))
    assert done.code == 0, done.err
    assert f"```\n{done.out}```" in TEXT


def test_the_tables_are_those_that_ship() -> None:
    (digest,) = re.findall(r"digest\s`(sha256:\w+)\.\.\.`", TEXT)
    assert (ROOT / f"{TABLES}.sglang.yaml").read_text().splitlines()[-1].startswith(f'digest: "{digest}')
    facts = load_table(ROOT / f"{TABLES}.sglang.yaml").facts
    for fact in (facts.hardware["name"], facts.software["driver"], facts.software["flashinfer"]):
        assert str(fact) in TEXT


@pytest.mark.parametrize(
    ("q_lens", "told", "page"),
    [((), "56 of 72", "h200.md"), ((4,), "7 of 9", "engines.md")],
    ids=["every q_len", "q_len 4"],
)
def test_what_the_shipped_table_decides_of_captured_calls(
    q_lens: tuple[int, ...], told: str, page: str, caplog: pytest.LogCaptureFixture
) -> None:
    table = load_table(ROOT / f"{TABLES}.sglang.yaml")
    router = Router.load(ROOT / f"{TABLES}.sglang.yaml", facts=table.facts)
    (shape, dtypes) = next(
        (entry.shape, entry.dtypes)
        for entry in table.entries
        if (entry.shape.num_qo_heads, entry.shape.head_dim, entry.dtypes.kv) == (8, 128, "bf16")
    )
    with caplog.at_level("INFO"):
        Runtime(router, engine="sglang", mode=Mode.OBSERVE).chooser(
            shape,
            dtypes,
            max_context=131072,
            stock="xqa-decode",
            fallback="fmha-v2",
            deployable=frozenset({"xqa-decode", "fmha-v2"}),
            q_lens=q_lens,
        )
    line = f"{told} captured (batch, q_len) are decided by the table, 0 of them away from xqa-decode"
    assert line in caplog.text
    text = " ".join((DOCS / page).read_text().split())
    if page == "engines.md":
        assert line in text and f"active, {str(router.digest)[:15]}...," in text
    else:
        assert f"({told.split()[0]} by the table as committed here)" in text


def test_the_faults_add_up_and_the_contract_still_refuses_them() -> None:
    known = {(case.fault, case.route): case for case in CASES["cuda"]}
    seen: Counter[str] = Counter()
    for fault, _, *cells, rule in rows("fault"):
        for route, cell in zip(ROUTES, cells, strict=True):
            assert bool(cell) == ((fault, route) in known), (fault, route)
            if cell:
                seen[cell.strip("`")] += 1
                found = refusal(known[fault, route], COLUMNS["cuda"])[0]
                assert found == said(rule, route), (fault, route)
    told = re.search(r"^1 limit, [^.]*", TEXT, re.MULTILINE)
    assert told is not None
    for count, word in re.findall(r"(\d+) (?:`(\w+)`|(?:limit|refused|safe)\b)", told.group(0)):
        assert word == "" or seen[word] == int(count)
    assert {word: seen[word] for word in ("limit", "refused", "safe")} == {
        "limit": 1,
        "refused": 4,
        "safe": 7,
    }
    assert sum(seen[kind] for kind in KINDS) == 34 and sum(seen.values()) == 46


def said(rule: str, route: str) -> str:
    """A cell such as ```new_tokens`, full; fa2 and fa3 static`` as ``refusal`` has it for ``route``."""
    if not rule:
        return ""
    name, level, others = re.fullmatch(r"`(\w+)`, (\w+)(?:; (.+) static)?", rule).groups()  # type: ignore[union-attr]
    return f"{name} ({'static' if route in (others or '').split(' and ') else level})"


def test_a_fault_that_nothing_refuses_is_not_said_to_be_refused() -> None:
    assert refusal(Case("pad-with-0", "fa2", "padded_rows", pad_value=0), COLUMNS["cuda"]) == ("", "")
    assert said("`new_tokens`, full; fa2 and fa3 static", "fa3") == "new_tokens (static)"
    assert said("`new_tokens`, full; fa2 and fa3 static", "fmha-v2") == "new_tokens (full)"


def test_the_sanitizers_lines_are_of_the_memory_faults() -> None:
    faults = {
        (fault, route)
        for fault, _, *cells, _ in rows("fault")
        for route, cell in zip(ROUTES, cells, strict=True)
        if cell == "`illegal_access`"
    }
    text = TEXT[TEXT.index("under compute-sanitizer (memcheck") :]
    lines = re.findall(r"^\| ([\w-]+) \| ([\w-]+) \| (?:no finding|\w+ of \d+ bytes)", text, re.MULTILINE)
    assert sorted(lines) == sorted(faults)


def test_the_corners_add_up() -> None:
    seen, absent = Counter[str](), Counter[str]()
    table = rows("corner")
    assert [cells[0] for cells in table] == [corner.name for corner in CORNERS]
    for _, _, *cells in table:
        seen.update(cells)
        absent.update(route for route, cell in zip(ROUTES, cells, strict=True) if cell == "not here")
    told = re.search(r"215 pairs [^.]*not here", TEXT)
    assert told is not None
    counts = {
        word: int(count) for count, word in re.findall(r"(\d+) (safe|refused|unsafe|not here)", told.group(0))
    }
    assert counts == {
        **{word: seen[word] for word in ("safe", "refused", "not here")},
        "unsafe": seen["`nan_leak`"] + seen["`unwritten_output`"],
    }
    assert sum(counts.values()) == 215
    assert absent == {"fmha-v2": 17, "fa3": 11, "fa2": 1, "fa2-decode": 1}
    assert "30 of 215 pairs without a module: 17 are fmha-v2's" in TEXT
    assert sum(int(cells[1]) for cells in rows("route, KV")) == counts["safe"]


def number(cell: str) -> int:
    """``13,097`` as a number."""
    return int(cell.replace(",", ""))


def test_the_soaks_add_up() -> None:
    table = rows("table | seed")
    for cells in table:
        runs, launches, undone = (number(cells[column]) for column in (3, 4, 9))
        assert launches == 16 * (runs - undone), cells
    assert f"{sum(number(cells[4]) for cells in table):,} launches, 0 failures" in TEXT
    undone, runs = (sum(number(cells[column]) for cells in table) for column in (9, 3))
    assert f"{undone} of {runs} runs without a module" in TEXT


def test_the_accusations_add_up() -> None:
    table = [cells for cells in rows("route | columns") if "earlier" not in cells[0]]
    checks, launches = (sum(number(cells[column]) for cells in table) for column in (3, 4))
    assert f"{launches:,} launches, {checks:,} checks passed" in TEXT
    assert f"| {launches:,} and 11,654 launches, 0 accusations |" in TEXT


def test_the_other_routes_add_up() -> None:
    table = rows("route | KV")
    checks, launches = (sum(number(cells[column]) for cells in table) for column in (3, 4))
    assert TEXT.count(f"{checks} checks, {launches} launches") == 2


def test_the_loop_is_told_alike() -> None:
    ((_, steps, launches, verified, *_),) = rows("seconds | steps")
    assert number(launches) == 15 * number(steps)
    assert number(verified) == -(-number(steps) // 10)
    assert TEXT.count(f"{launches} launches") == 2
