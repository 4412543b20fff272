"""``docs/h200.md``: its links lead somewhere, its commands exist, its tables agree with each other."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from pathlib import Path

import pytest

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
    (command,) = [words for words in commands() if words[0] == "autotune"]
    done = cli(*(ROOT / word if word.endswith(".yaml") else word for word in command[1:]))
    assert done.code == 0, done.err
    assert f"```\n{done.out}```" in TEXT


def test_the_tables_are_those_that_ship() -> None:
    (digest,) = re.findall(r"digest `(sha256:\w+)\.\.\.`", TEXT)
    assert (ROOT / f"{TABLES}.sglang.yaml").read_text().splitlines()[-1].startswith(f'digest: "{digest}')
    facts = load_table(ROOT / f"{TABLES}.sglang.yaml").facts
    for fact in (facts.hardware["name"], facts.software["driver"], facts.software["flashinfer"]):
        assert str(fact) in TEXT


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
    names, seen = {corner.name for corner in CORNERS}, Counter[str]()
    for name, _, *cells in rows("corner"):
        assert name in names
        seen.update("not finished" if re.match("not run|cut after", cell) else cell for cell in cells)
    told = re.search(r"215 pairs [^.]*not here", TEXT)
    assert told is not None
    counts = {
        word: int(count) for count, word in re.findall(r"(\d+) (safe|refused|unsafe|not \w+)", told.group(0))
    }
    unsafe = seen["`nan_leak`"] + seen["`unwritten_output`"]
    assert counts == {
        **{word: seen[word] for word in ("safe", "refused", "not finished", "not here")},
        "unsafe": unsafe,
    }
    assert sum(counts.values()) == 215


def test_the_accusations_add_up() -> None:
    table = rows("route | columns")
    assert sum(int(cells[3].replace(",", "")) for cells in table) == 1312
    assert sum(int(cells[4].replace(",", "")) for cells in table) == 11654
    assert "11,654 launches, 1,312 checks passed" in TEXT
