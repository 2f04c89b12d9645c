"""The generated code of rpc.proto is up to date. `--rewrite` generates it again."""

import re
from pathlib import Path

import pytest

from tests.tidy.sources import ROOT

HERE = ROOT / "src" / "rallypoint" / "backends" / "etcd"
NAMES = ("rpc_pb2.py", "rpc_pb2.pyi")


def generated(proto: Path, into: Path) -> dict[str, str]:
    """File name -> the code of protoc, without its dependence on one version and on the global descriptor pool."""
    protoc = pytest.importorskip("grpc_tools.protoc", reason="needs grpcio-tools")
    arguments = [f"-I{proto.parent}", f"--python_out={into}", f"--pyi_out={into}", proto.name]
    assert protoc.main(["protoc", *arguments]) == 0
    return {name: loosened((into / name).read_text(encoding="utf-8")) for name in NAMES}


def loosened(code: str) -> str:
    """The code, changed to work with later versions of protobuf and beside other messages with the same names."""
    code = re.sub(r"^# Protobuf Python Version.*\n", "", code, flags=re.MULTILINE)
    code = re.sub(r"^from google.protobuf import runtime_version.*\n", "", code, flags=re.MULTILINE)
    code = re.sub(
        r"^_runtime_version\.ValidateProtobufRuntimeVersion\(.*?^\)\n", "", code, flags=re.MULTILINE | re.DOTALL
    )
    return code.replace("_descriptor_pool.Default()", "_descriptor_pool.DescriptorPool()")


def test_generated_code_is_what_the_proto_file_gives(tmp_path, request):
    wanted = generated(HERE / "rpc.proto", tmp_path)
    if request.config.getoption("--rewrite"):
        for name, code in wanted.items():
            (HERE / name).write_text(code, encoding="utf-8")
    assert {name: (HERE / name).read_text(encoding="utf-8") for name in NAMES} == wanted, "make check ARGS=--rewrite"


def test_changed_proto_file_would_be_noticed(tmp_path):
    changed = tmp_path / "rpc.proto"
    changed.write_text((HERE / "rpc.proto").read_text(encoding="utf-8").replace("lease = 6", "lease = 7"), "utf-8")
    assert generated(changed, tmp_path) != generated(HERE / "rpc.proto", tmp_path)


def test_generated_code_asks_for_no_version_and_keeps_its_names_to_itself():
    code = (HERE / "rpc_pb2.py").read_text(encoding="utf-8")
    assert "runtime_version" not in code
    assert "_descriptor_pool.Default()" not in code
