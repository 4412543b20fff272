"""``benchmarks/noise.py`` on rounds whose noise is known, and ``recorded.py``'s sources."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import numpy as np
import pytest

from autotune.bench.record import Round
from autotune.domain.cell import Cell, Column
from autotune.domain.dtypes import PROFILES
from autotune.domain.shape import Shape
from benchmarks import noise
from benchmarks.recorded import RecordedError, Recording, Recordings, read
from benchmarks.svg import Bar, bars

SHAPE = Shape(num_qo_heads=8, num_kv_heads=1, head_dim=128, page_size=16)


def cell(number: int) -> Cell:
    return Cell(Column(SHAPE, PROFILES["bf16"], 1, number + 1, 2048), 1, 1024)


def recording(
    number: int,
    rng: np.random.Generator,
    *,
    rounds: int = 64,
    first: float = 0.0,
    shift: float = 0.0,
    carried: float = 0.0,
    warm: float = 0.0,
    process: str = "one",
) -> Recording:
    """Two routes of equal time with 1 % noise each.

    ``first``: what the place at the front costs. ``shift``: of a's log time. ``carried``: lag-1
    autocorrelation. ``warm``: what the first of 16 start-up rounds costs b, halved from each to the next.
    """

    def one(index: int, offset: float) -> Round:
        order = ("a", "b") if rng.random() < 0.5 else ("b", "a")
        times = {
            name: float(100 * np.exp(0.01 * rng.standard_normal() + (first if order[0] == name else 0.0)))
            for name in order
        }
        times["a"] *= float(np.exp(shift + offset))
        same = dict.fromkeys(order, 1.0)
        return Round(index, order, times, same, same, dict.fromkeys(order, 4))

    level = 0.0
    counted = []
    for index in range(rounds):
        level = carried * level + (0.014 * rng.standard_normal() if carried else 0.0)
        counted.append(one(index, level))
    start = tuple(one(-1 - index, -warm * 0.5**index) for index in range(16)) if warm else ()
    return Recording(cell(number), process, tuple(counted), start, chunk=8)


def recordings(count: int, **more: float) -> Recordings:
    rng = np.random.default_rng(5)
    return Recordings("test", "a device", tuple(recording(i, rng, **more) for i in range(count)))  # type: ignore[arg-type]


def test_white_noise_shows_no_autocorrelation_and_a_level_that_carries_over_does() -> None:
    white = [values for _, _, values in noise.series(recordings(40))]
    assert abs(noise.autocorrelation(white, 1)) < 0.05
    carried = [values for _, _, values in noise.series(recordings(40, carried=0.8))]
    assert noise.autocorrelation(carried, 1) > 0.4
    assert noise.autocorrelation(carried, 1) > noise.autocorrelation(carried, 4) > 0.05
    assert noise.autocorrelation([noise.signs(values) for values in carried], 1) > 0.3


def test_a_short_series_does_not_lean() -> None:
    rng = np.random.default_rng(1)
    short = [rng.standard_normal(8) for _ in range(3_000)]
    for lag in (1, 2, 4):
        assert abs(noise.autocorrelation(short, lag)) < 0.03


def test_the_place_in_a_round_is_found_and_a_harmless_one_bounded() -> None:
    places, orders = noise.by_place(recordings(40, first=0.02))
    assert places["a", "first"].mean == pytest.approx(0.02, abs=0.004)
    assert places["a", "last"].mean == pytest.approx(-0.02, abs=0.004)
    assert orders["a", "b"].mean == pytest.approx(0.04, abs=0.006)
    none, _ = noise.by_place(recordings(40))
    assert all(each.bound < 0.006 for each in none.values())


def test_the_start_is_seen_where_its_rounds_were_kept() -> None:
    found = {(name, kind): each for name, kind, each in noise.by_age(recordings(30, warm=0.06))}
    assert found["thrown away: 1st", "a / b"].mean == pytest.approx(-0.06, abs=0.012)
    assert abs(found["thrown away: later", "a / b"].mean) < 0.005
    assert abs(found["counted: 1st", "a / b"].mean) < 0.01
    assert not any(name.startswith("thrown") for name, _, _ in noise.by_age(recordings(30)))


def test_tails_are_held_against_a_normal_s() -> None:
    rng = np.random.default_rng(2)
    normal = noise.tails_of([rng.standard_normal(64) for _ in range(200)])
    heavy = noise.tails_of([rng.standard_t(2, 64) for _ in range(200)])
    assert normal.past5 < 0.001 < 0.02 < heavy.past5
    assert abs(normal.kurtosis) < 0.3 < 1.0 < heavy.kurtosis


def test_tau_is_the_shift_between_processes_without_the_rounds_own_noise() -> None:
    rng = np.random.default_rng(3)

    def both(spread: float) -> Recordings:
        items = [
            recording(i, rng, shift=spread * rng.standard_normal(), process=process)
            for i in range(60)
            for process in ("one", "two")
        ]
        return Recordings("test", "a device", tuple(items))

    assert noise.shifts(both(0.03))["a / b"].tau == pytest.approx(0.03, rel=0.3)
    still = noise.shifts(both(0.0))["a / b"]
    assert still.tau < 0.002
    assert still.sampling == pytest.approx(0.0022, rel=0.3)
    assert noise.shifts(recordings(3)) == {}


def test_the_report_has_every_section_and_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = written(tmp_path / "rounds.jsonl", recordings(6, warm=0.05))
    picture = tmp_path / "noise.svg"
    assert noise.main([str(source), "--svg", str(picture)]) == 0
    out = capsys.readouterr().out
    assert all(title in out for title, _ in noise.SECTIONS)
    assert "No cell was timed in two processes." in out
    assert picture.read_text().startswith("<svg") and picture.stat().st_size < 100_000


def written(path: Path, found: Recordings) -> Path:
    """The lines that ``record_rounds.py`` would have written."""
    lines: list[dict[str, object]] = [{"kind": "header", "device": found.device, "seed": 1}]
    for item in found.items:
        lines.append(
            {
                "kind": "rounds",
                "process": 0,
                "cell": item.cell.to_dict(),
                "chunk": item.chunk,
                "start_up": [each.to_dict() for each in item.start_up],
                "rounds": [each.to_dict() for each in item.rounds],
            }
        )
    text = "".join(json.dumps(line) + "\n" for line in lines)
    path.write_bytes(lzma.compress(text.encode()) if path.suffix == ".xz" else text.encode())
    return path


def test_lines_come_back_as_they_were_packed_or_not(tmp_path: Path) -> None:
    found = recordings(3, warm=0.05)
    for name in ("rounds.jsonl", "rounds.jsonl.xz"):
        again = read(str(written(tmp_path / name, found)))
        assert again.device == "a device"
        assert [(x.cell, x.rounds, x.start_up, x.chunk) for x in again.items] == [
            (x.cell, x.rounds, x.start_up, x.chunk) for x in found.items
        ]
    # these rounds were not run in the order that this seed draws: their lengths are not known
    assert again.items[0].log_lengths(1) is None


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("none.jsonl", None, "No such file"),
        ("none.db", None, "no such file"),
        ("empty.jsonl", "", "holds no rounds"),
        ("other.jsonl", '{"kind": "rounds"}\n', "line 1 is no line"),
        ("text.jsonl", "hello\n", "line 1 is no line"),
        ("text.db", "hello\n", "not a database"),
        ("text.db.xz", "hello\n", "format not supported"),
    ],
)
def test_a_bad_source_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str | None, says: str
) -> None:
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    with pytest.raises(RecordedError, match=says):
        read(str(path))
    assert noise.main([str(path)]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and str(path) in said


def test_bars_are_drawn_to_scale() -> None:
    text = bars("a & b", [Bar("half", 1.0), Bar("whole", 2.0, 1.0, 4.0)], mark=1.0)
    assert "a &amp; b" in text
    assert 'width="125.0"' in text and 'width="250.0"' in text
