"""What a directory of safetensors is made of. No torch: to write them takes none."""

from __future__ import annotations

INDEX = "model.safetensors.index.json"
HEADER_BYTES_MAX = 100_000_000  # what the safetensors library reads
KINDS = {  # by torch's names
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32",
    "int32": "I32", "uint64": "U64", "int64": "I64", "float16": "F16", "bfloat16": "BF16",
    "float32": "F32", "float64": "F64", "complex64": "C64", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ",
}  # fmt: skip
