"""Element types by torch's names, for the parts that know no torch."""

from __future__ import annotations

_NAMES = {
    1: (
        "bool uint8 int8 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu"
        " float4_e2m1fn_x2"
    ),
    2: "uint16 int16 float16 bfloat16",
    4: "uint32 int32 float32 complex32",
    8: "uint64 int64 float64 complex64",
    16: "complex128",
}
ITEM_BYTES = {name: size for size, names in _NAMES.items() for name in names.split()}
