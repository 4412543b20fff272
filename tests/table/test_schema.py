from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import given, settings

from autotune.domain.dtypes import Dtype
from autotune.domain.fingerprint import HARDWARE_KEYS, SOFTWARE_KEYS
from autotune.domain.shape import KvLayout, Mask
from autotune.domain.verdict import FailureKind
from autotune.table import schema
from autotune.table.build import DecidedCell
from autotune.table.dump import dump_table
from autotune.table.letters import RESERVED
from autotune.table.model import SCHEMA, Quarantine
from tests.table import samples

# an offline GPU host runs these tests too, with the wheels it was handed
jsonschema = pytest.importorskip("jsonschema")

SCHEMA_DOCUMENT = schema()
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA_DOCUMENT)


def parsed(cells: list[DecidedCell], **more: Any) -> Any:
    return yaml.safe_load(dump_table(samples.table_of(cells, **more)))


def test_the_schema_is_itself_valid() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA_DOCUMENT)


def test_the_schema_names_what_the_code_names() -> None:
    properties, defs = SCHEMA_DOCUMENT["properties"], SCHEMA_DOCUMENT["$defs"]
    assert properties["schema"]["const"] == SCHEMA
    assert {key: value["const"] for key, value in properties["legend"]["properties"].items()} == RESERVED
    assert set(properties["legend"]["required"]) == set(RESERVED)
    for block in properties["hardware"]["oneOf"]:
        device = block["properties"]["device"]["const"]
        assert tuple(block["required"]) == ("device", *HARDWARE_KEYS[device]) == tuple(block["properties"])
    assert [tuple(block["required"]) for block in properties["software"]["oneOf"]] == [
        SOFTWARE_KEYS["cpu"],
        SOFTWARE_KEYS["cuda"],
    ]
    assert set(properties["unsafe"]["items"]["properties"]["kind"]["enum"]) == {k.value for k in FailureKind}
    assert set(defs["dtype"]["enum"]) == {dtype.value for dtype in Dtype}
    assert tuple(defs["shape"]["required"]) == tuple(samples.SHAPE.to_dict())
    assert set(defs["shape"]["properties"]["kv_layout"]["enum"]) == {layout.value for layout in KvLayout}
    assert set(defs["shape"]["properties"]["mask"]["enum"]) == {mask.value for mask in Mask}


@given(samples.cell_lists())
@settings(max_examples=30, deadline=None)
def test_any_dumped_table_is_valid(cells: list[DecidedCell]) -> None:
    VALIDATOR.validate(parsed(cells))


def test_cuda_unsafe_and_quarantine_are_valid() -> None:
    items = [
        Quarantine(samples.SPLIT, "crash", "2026-12-01T00:00:00Z", samples.SHAPE, samples.DTYPES, 4, 2),
        Quarantine(samples.SPLIT, "crash", "2026-12-01T00:00:00Z"),
    ]
    VALIDATOR.validate(parsed(samples.sample_cells(), facts=samples.CUDA_FACTS, quarantine=items))
    VALIDATOR.validate(yaml.safe_load(dump_table(samples.sample())))


BROKEN = {
    "missing key": lambda table: table.pop("policy"),
    "unknown key": lambda table: table.update(extra=1),
    "newer": lambda table: table.update(schema="autotune/routing-table/2"),
    "digest": lambda table: table.update(digest="sha256:0"),
    "missing fact": lambda table: table["hardware"].pop("isa"),
    "legend meaning": lambda table: table["legend"].update({".": "torch-splitkv"}),
    "legend letter": lambda table: table["legend"].update({"ss": "torch-splitkv"}),
    "reserved name": lambda table: table["legend"].update({"s": "fallback"}),
    "family": lambda table: table["families"].update({"torch-sdpa": "slow"}),
    "bool for int": lambda table: table["entries"][0].update(q_len=True),
    "shape key": lambda table: table["entries"][0]["shape"].pop("mask"),
    "dtype": lambda table: table["entries"][0]["dtypes"].update(kv="int3"),
    "row end": lambda table: table["entries"][0]["routes"].update({"01": "ssss"}),
    "no any": lambda table: table["entries"][0]["routes"].pop("any"),
    "interval": lambda table: table["entries"][0]["eager"].update(batch_size=[[2]]),
    "ratio": lambda table: table["entries"][0]["speedup"]["low"].update({"1024": [-1.0]}),
    "proof": lambda table: table["entries"][0]["proof"]["torch-splitkv"].pop("limits"),
    "kind": lambda table: table["unsafe"][0].update(kind="bad_luck"),
    "quarantine": lambda table: table["quarantine"].append({"route": "torch-splitkv"}),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_table_is_not_valid(name: str) -> None:
    table = yaml.safe_load(dump_table(samples.sample()))
    VALIDATOR.validate(table)
    BROKEN[name](table)
    assert not VALIDATOR.is_valid(table)
