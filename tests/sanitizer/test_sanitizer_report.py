"""memcheck's output, as its versions print it."""

from __future__ import annotations

import pytest

from autotune.sanitizer.finding import MOST_NAME, Finding, Nearest
from autotune.sanitizer.report import kernel_of, parse
from tests.sanitizer import outputs


def found(output: str) -> Finding:
    first = parse(output).first
    assert first is not None
    return first


def test_after_an_allocation() -> None:
    report = parse(outputs.AFTER)
    assert report.first == Finding(
        kernel="kernel_mha",
        access="read",
        space="global",
        size=4,
        address=0x79FD33FD0980,
        nearest=Nearest("after", 129, 4_000_000),
        thread="96,0,0",
        block="3906,0,1",
    )
    assert (report.errors, report.began, report.complaint) == (96, True, "")
    assert str(report.first) == (
        "invalid global read of 4 bytes at 0x79fd33fd0980, 129 bytes after an allocation of 4,000,000 bytes, "
        "in kernel_mha, thread (96,0,0) of block (3906,0,1)"
    )


def test_before_an_allocation() -> None:
    first = found(outputs.BEFORE)
    assert (first.access, first.kernel) == ("atomic", "acme::count<(int)128, (bool)1>")
    assert first.nearest == Nearest("before", 4, 2048)
    assert parse(outputs.BEFORE).errors == 1


def test_misaligned() -> None:
    first = found(outputs.MISALIGNED)
    assert (first.access, first.misaligned, first.kernel) == ("write", True, "unaligned_kernel")
    assert str(first).startswith("misaligned global write of 4 bytes at 0x710fdca00001, inside an allocation")


def test_the_kernel_is_the_last_device_frame_whatever_the_locale() -> None:
    first = found(outputs.INLINED)
    assert first.kernel == "flash::fwd_kernel<flash::Traits<(int)128>>"
    assert first.nearest == Nearest("before", 1536, 1024)


def test_an_old_version() -> None:
    report = parse(outputs.OLD)
    assert report.first == Finding(
        "vector_projection<double>", "read", "shared", 8, 0x964000008, thread="251,0,0", block="0,0,0"
    )
    assert report.errors == 1  # it was cut off before it counted


@pytest.mark.parametrize(
    ("output", "complaint"),
    [
        (outputs.CLEAN, ""),
        (outputs.UNSUPPORTED, "Device not supported. Please refer to the"),
        (outputs.NO_LAUNCH, "Target application terminated before first instrumented API call"),
    ],
)
def test_no_finding(output: str, complaint: str) -> None:
    report = parse(output)
    assert (report.first, report.began) == (None, True)
    assert report.complaint.startswith(complaint)
    assert bool(report.complaint) == bool(complaint)


def test_what_a_program_prints_itself_is_no_report() -> None:
    said = "Invalid __global__ read of size 4 bytes\nERROR SUMMARY: 3 errors\nError: mine\n"
    assert parse(said) == parse("")
    assert parse("").began is False


@pytest.mark.parametrize("output", [outputs.AFTER, outputs.INLINED, outputs.OLD, outputs.UNSUPPORTED])
def test_cut_off_anywhere(output: str) -> None:
    for end in range(len(output)):
        report = parse(output[:end])
        assert report.first is None or report.first.size >= 1
        assert len(str(report.first)) < 400


@pytest.mark.parametrize(
    ("place", "kernel"),
    [
        ("attend+0x3440 in planted_kernels.py:42", "attend"),
        ("0x20 in IncrementTwice(unsigned int*)", "IncrementTwice"),
        (
            "void cudf::<unnamed>::probe<a<(bool)0>>(T1, int)+0x22e20 in join.cuh:3",
            "cudf::<unnamed>::probe<a<(bool)0>>",
        ),
        ("void (anonymous namespace)::fill<4>(int *)+0x10", "(anonymous namespace)::fill<4>"),
        ("/usr/include/sync.h:81:_ZN37_INTERNAL_atomic_addEPVjj", "_ZN37_INTERNAL_atomic_addEPVjj"),
    ],
)
def test_names(place: str, kernel: str) -> None:
    assert kernel_of(place) == kernel


def test_a_long_name_is_cut_in_words_only() -> None:
    finding = Finding("k" * 500, "write", "global", 1)
    assert str(finding) == f"invalid global write of 1 byte, in {'k' * (MOST_NAME - 3)}..."
    assert len(finding.kernel) == 500
