"""Signed tables: with ``AUTOTUNE_PUBKEY`` set nothing but a valid signature opens one."""

from __future__ import annotations

import base64
import os
import sys
from pathlib import Path

import pytest

from autotune.router import Router
from autotune.table import signature
from autotune.table.dump import dump_table, write_table
from autotune.table.errors import TableError
from autotune.table.load import load_table
from tests.console import cli
from tests.table import samples

VARIABLE = "AUTOTUNE_PUBKEY"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "table.yaml"
    write_table(samples.sample(), path)
    return path


def refused(path: Path) -> str:
    with pytest.raises(TableError) as caught:
        load_table(path)
    router = Router.load(path, facts=samples.FACTS)
    assert (router.status.state, router.digest) == ("inactive", None)
    message = str(caught.value)
    assert message.startswith(f"{path}: signature: ")
    assert "\n" not in message
    return message


def test_without_the_package_a_demanded_signature_is_a_refusal(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "cryptography"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    assert Router.load(path, facts=samples.FACTS).status.active
    monkeypatch.setenv(VARIABLE, base64.b64encode(bytes(32)).decode())
    assert "kernel-autotune[sign]" in refused(path)
    result = cli("sign", path, "--key", path)
    assert (result.code, "kernel-autotune[sign]" in result.line) == (2, True)


class TestWithCryptography:
    @pytest.fixture(autouse=True)
    def _needs(self) -> None:
        pytest.importorskip("cryptography")

    @pytest.fixture
    def key(self, tmp_path: Path) -> Path:
        return self.new_key(tmp_path / "key.pem")

    @staticmethod
    def new_key(path: Path) -> Path:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

        key = Ed25519PrivateKey.generate()
        path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        return path

    @staticmethod
    def public_pem(key: Path) -> bytes:
        from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

        public = load_pem_private_key(key.read_bytes(), None).public_key()
        return bytes(public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))

    def test_signed_and_checked(self, path: Path, key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        result = cli("sign", path, "--key", key, "--json")
        assert result.code == 0, result.err
        public = result.json["public_key"]
        assert load_table(path).entries  # not demanded: the signature does not matter
        pem = path.with_name("public.pem")
        pem.write_bytes(self.public_pem(key))
        for value in (public, str(pem)):
            monkeypatch.setenv(VARIABLE, value)
            assert Router.load(path, facts=samples.FACTS).status.active

    def test_what_is_refused(self, path: Path, key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        public = cli("sign", path, "--key", key, "--json").json["public_key"]
        beside = Path(f"{path}.sig")
        signature, table = beside.read_bytes(), path.read_bytes()
        monkeypatch.setenv(VARIABLE, public)
        assert load_table(path).entries
        # a table with a right digest that somebody else wrote
        path.write_bytes(samples.edited(table, "torch-sdpa", "torch-other", 99))
        assert "does not fit" in refused(path)
        path.write_bytes(table)
        for index in range(8, len(signature) - 4, 7):
            changed = bytearray(signature)
            changed[index] = ord("A") if changed[index] != ord("A") else ord("B")
            beside.write_bytes(changed)
            assert "does not fit" in refused(path)
        for odd in (
            b"",
            b"ed25519:",
            signature[:-4],
            signature + signature,
            b"\xff" * 97,
            b"rsa" + signature[7:],
        ):
            beside.write_bytes(odd)
            assert "is not a signature" in refused(path)
        beside.write_bytes(bytes(1 << 20))
        assert "larger" in refused(path)
        beside.unlink()
        assert "autotune sign" in refused(path)
        os.mkfifo(beside)
        assert "not a regular file" in refused(path)
        beside.unlink()
        beside.write_bytes(signature)
        assert load_table(path).entries
        stranger = self.new_key(path.with_name("stranger.pem"))
        cli("sign", path, "--key", stranger)
        assert "does not fit" in refused(path)

    @pytest.mark.parametrize("value", ["", "x", "/", "/dev/zero", "QUJD", "A" * 44, "\u00e9"])
    def test_a_variable_that_names_no_key(
        self, path: Path, key: Path, value: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        cli("sign", path, "--key", key)
        monkeypatch.setenv(VARIABLE, value)
        assert VARIABLE in refused(path)

    def test_other_kinds_of_key(self, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

        curve = tmp_path / "curve.pem"
        private = ec.generate_private_key(ec.SECP256R1())
        curve.write_bytes(private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        assert "not an Ed25519 key" in cli("sign", path, "--key", curve).line
        (tmp_path / "public.pem").write_bytes(self.public_pem(curve))
        monkeypatch.setenv(VARIABLE, str(tmp_path / "public.pem"))
        assert "not an Ed25519 key" in refused(path)
        assert "openssl genpkey" in cli("sign", path, "--key", path).line
        assert "openssl genpkey" in cli("sign", path, "--key", tmp_path / "absent").line

    def test_only_a_sound_table_is_signed(self, path: Path, key: Path) -> None:
        path.write_bytes(dump_table(samples.sample())[:-1])
        result = cli("sign", path, "--key", key)
        assert (result.code, Path(f"{path}.sig").exists()) == (2, False)

    def test_a_reload_waits_for_the_signature(
        self, path: Path, key: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(VARIABLE, cli("sign", path, "--key", key, "--json").json["public_key"])
        router = Router.load(path, facts=samples.FACTS)
        bound = router.bind(samples.SHAPE, samples.DTYPES, max_context=4096)
        flags = ["--route", samples.SPLIT, "--why", "x", "--by", "y"]
        assert cli("quarantine", path, *flags, "--batch", "2").code == 0
        assert not router.poll(min_interval_s=0.0)
        assert "does not fit" in router.status.refused
        assert bound.route(2, 4) == samples.SPLIT
        assert cli("sign", path, "--key", key).code == 0
        assert router.poll(min_interval_s=0.0)
        assert bound.route(2, 4) == samples.FALLBACK
        assert cli("quarantine", path, *flags, "--batch", "4", "--key", key).code == 0
        assert router.poll(min_interval_s=0.0)
        assert bound.route(4, 4) == samples.FALLBACK

    def test_a_relative_key_file_is_found_from_another_folder(
        self, path: Path, key: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (path.parent / "pub.pem").write_bytes(self.public_pem(key))
        (path.parent / "other").mkdir()
        assert cli("sign", path, "--key", key).code == 0
        monkeypatch.setenv(VARIABLE, "pub.pem")
        monkeypatch.setattr(signature, "_FOUND", {})
        monkeypatch.chdir(path.parent / "other")
        assert not Router.load(path, facts=samples.FACTS).status.active  # never found: nothing to remember
        monkeypatch.chdir(path.parent)
        assert Router.load(path, facts=samples.FACTS).status.active
        monkeypatch.chdir("other")
        assert Router.load(path, facts=samples.FACTS).status.active
