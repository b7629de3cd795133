#!/bin/sh
# Turn control.proto into control_pb2.py, control_pb2.pyi and control_pb2_grpc.py, and record what was made of what.
#
# Generated code asks for a protobuf runtime at least as new as its generator's: what grpcio-tools 1.66.2 makes runs under
# protobuf 5.27 to 7 (the floor in pyproject.toml). So that exact version is used, in an environment of its own under
# build/. PYTHON names another Python that has it already.
set -eu

wanted=1.66.2
cd "$(dirname "$0")/.."

if [ -z "${PYTHON:-}" ]; then
    PYTHON=build/protoc/bin/python
    if [ ! -x "$PYTHON" ]; then
        python3 -m venv build/protoc
        "$PYTHON" -m pip install --quiet --disable-pip-version-check "grpcio-tools==$wanted" 'setuptools<81'
    fi
fi
got=$("$PYTHON" -c 'from importlib.metadata import version; print(version("grpcio-tools"))' 2>/dev/null || echo none)
if [ "$got" != "$wanted" ]; then
    echo "generate.sh: $PYTHON has grpcio-tools $got, wanted $wanted; unset PYTHON to have it installed under build/" >&2
    exit 2
fi

"$PYTHON" -m grpc_tools.protoc -Ittp/proto=proto --python_out=. --pyi_out=. --grpc_python_out=. ttp/proto/control.proto
cd proto
sha256sum control.proto control_pb2.py control_pb2.pyi control_pb2_grpc.py > generated.sha256
