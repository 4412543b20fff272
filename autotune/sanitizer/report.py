"""Reads memcheck's text output; its format is in NVIDIA's Compute Sanitizer manual, "Understanding Memcheck".

The same access as versions 2021 to 2026 print it::

    ========= Invalid __global__ read of size 4 bytes
    =========     at add(const float *, float *, int)+0x80 in add.cu:8     (older: at 0x80 in add(...))
    =========     by thread (96,0,0) in block (3906,0,0)
    =========     Access to 0x79fd33fd0980 is out of bounds                (older: Address 0x...)
    =========     and is 129 bytes after the nearest allocation at 0x79fd33c00000 of size 4,000,000 bytes
    =========         Device Frame: kernel(...)+0x30 in add.cu:12

``at`` is an inlined function where the kernel has line information; the kernel is then the last device frame.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from autotune.sanitizer.finding import Finding, Nearest

_BANNER = "COMPUTE-SANITIZER"
_LINE = re.compile(r"^=========(?: (.*))?$")
_NUMBER = r"[\d.,']+"  # separated as the locale has it
_INVALID = re.compile(rf"Invalid __(\w+?)__ (\w+) of size ({_NUMBER}) bytes?")
_THREAD = re.compile(r"by thread \(([\d,]+)\) in block \(([\d,]+)\)")
_ADDRESS = re.compile(r"(?:Address|Access (?:at|to)) (0x[0-9a-fA-F]+) is (misaligned)?")
_NEAREST = re.compile(
    rf"and is (?:(inside)|({_NUMBER}) bytes (after|before)) the nearest allocation at 0x[0-9a-fA-F]+ "
    rf"of size ({_NUMBER}) bytes?"
)
_FRAME = re.compile(r"Device Frame: ?(.+)")
_SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) errors?$")
_ERROR = re.compile(r"(?:Internal Sanitizer )?Error: (.+)")
# What it says of a program that ends with a non-zero status, as a failed proof does.
_EXPECTED = ("process didn't terminate successfully", "couldn't find exit code")


@dataclass(frozen=True, slots=True)
class Report:
    """What one run printed.

    Attributes:
        first: the first invalid access; None if none is reported.
        errors: by the tool's own count, or as many as were read where it did not come to count.
        began: whether the tool ran at all.
        complaint: what it says went wrong with itself; "" if nothing.
    """

    first: Finding | None
    errors: int
    began: bool
    complaint: str = ""


def parse(output: str) -> Report:
    """The report in ``output``, which may hold the program's own lines and may be cut off anywhere."""
    lines = [match[1] or "" for line in output.splitlines() if (match := _LINE.match(line.rstrip()))]
    lines = [line.strip() for line in lines]
    blocks = [_block(lines, index) for index, line in enumerate(lines) if _INVALID.match(line)]
    complaints = [
        match[1] for line in lines if (match := _ERROR.match(line)) and not match[1].startswith(_EXPECTED)
    ]
    counted = next((int(match[1]) for line in lines if (match := _SUMMARY.match(line))), None)
    return Report(
        first=_finding(blocks[0]) if blocks else None,
        errors=len(blocks) if counted is None else max(counted, len(blocks)),
        began=_BANNER in lines,
        complaint=complaints[0] if complaints else "",
    )


def _block(lines: list[str], start: int) -> list[str]:
    """The lines of one access, up to the empty one that ends it."""
    block = [lines[start]]
    for line in lines[start + 1 :]:
        if not line or _INVALID.match(line):
            break
        block.append(line)
    return block


def _finding(block: list[str]) -> Finding:
    head = _INVALID.match(block[0])
    assert head is not None
    text = " ".join(block)
    thread, address, nearest = _THREAD.search(text), _ADDRESS.search(text), _NEAREST.search(text)
    places = [line[3:] for line in block[1:] if line.startswith("at ")][:1]
    places += [match[1] for line in block if (match := _FRAME.match(line))]
    return Finding(
        kernel=kernel_of(places[-1]) if places else "",
        access=head[2],
        space=head[1],
        size=_number(head[3]),
        address=int(address[1], 16) if address else None,
        misaligned=address is not None and address[2] is not None,
        nearest=_nearest(nearest) if nearest else None,
        thread=thread[1] if thread else "",
        block=thread[2] if thread else "",
    )


def _nearest(match: re.Match[str]) -> Nearest:
    inside, distance, side, size = match.groups()
    return Nearest(inside or side, 0 if inside else _number(distance), _number(size))


def _number(text: str) -> int:
    return int(re.sub(r"\D", "", text) or "0")


def kernel_of(place: str) -> str:
    """The function in ``void add<4>(int *)+0x80 in add.cu:8`` and its older spellings: ``add<4>``."""
    name = re.sub(r"^0x[0-9a-fA-F]+ in ", "", place.strip())
    name = re.sub(r"^\S+?\.\w+:\d+:(?=\S)", "", name)  # 2021: the source file comes first
    name = re.split(r"[+:]0x[0-9a-fA-F]+", name, maxsplit=1)[0]
    name = re.sub(r"\s*\[0x[0-9a-fA-F]+\].*$", "", name)
    return _without_parameters(name).removeprefix("void ").strip()


def _without_parameters(name: str) -> str:
    """``name`` up to the parenthesis that opens its parameters, which is none of a template argument's."""
    depth = 0
    for place, letter in enumerate(name):
        if letter == "<":
            depth += 1
        elif letter == ">":
            depth = max(0, depth - 1)
        elif letter == "(" and depth == 0 and not name.startswith("(anonymous", place):
            return name[:place]
    return name
