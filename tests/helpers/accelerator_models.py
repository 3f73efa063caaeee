"""Small models of sizes that the kernels of accelerators take."""

from typing import Any

from models import config as config_lib

_SIZES: dict[str, Any] = {
  "vocab_size": 512,
  "d_model": 256,
  "num_heads": 8,
  "num_kv_heads": 2,
  "head_dim": 64,
  "d_ff": 512,
  "d_expert": 128,
  "max_length": 256,
  "compute": config_lib.Compute(dtype="bfloat16"),
}
MODELS = {
  "dense": config_lib.tiny(num_layers=2, **_SIZES),
  "scanned": config_lib.tiny(num_layers=16, **_SIZES),
  "experts": config_lib.tiny_moe(num_layers=2, num_experts=8, **_SIZES),
  "scanned experts": config_lib.tiny_moe(
    num_layers=16, num_experts=8, **_SIZES
  ),
}
