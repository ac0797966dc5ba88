"""A checkpoint's files: which tensors of one layer's attention they hold, and their data on demand.

Shards are opened as they are needed and only the tensors asked for are read. Needs the safetensors library.
"""

import json
import math
import re
from contextlib import ExitStack
from pathlib import Path

import torch

_NAME = re.compile(r"(?:^|\.)layers\.(\d+)\.self_attn\.(.+)$")
# A buffer of some old checkpoints, no weight.
_IGNORED = "rotary_emb.inv_freq"
# What follows an FP8 weight's name in that of its scales, and the square blocks that share one (config.json:
# quantization_config.weight_block_size).
SCALE = "_scale_inv"
FP8_BLOCK = 128
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def _safetensors():
    try:
        import safetensors
    except ImportError as error:
        raise ImportError(
            "mla.weights: expected the safetensors library to read checkpoints, found none; "
            "pip install 'triton-mla[models]'"
        ) from error
    return safetensors


def find_files(path: str | Path) -> dict[str, Path]:
    """The file that holds each tensor of a checkpoint, by the tensor's name.

    Args:
        path: a .safetensors file, a .safetensors.index.json, or a folder with either.

    Raises:
        FileNotFoundError: nothing is there, or several files without an index.
        ValueError: the index has no weight_map.
    """
    path = Path(path)
    if path.is_dir():
        files = sorted(path.glob("*.safetensors.index.json")) or sorted(path.glob("*.safetensors"))
        if len(files) != 1:
            raise FileNotFoundError(
                f"{path}: expected one .safetensors file, or shards with one .safetensors.index.json, found "
                f"{', '.join(f.name for f in files) or 'none'}; name the file"
            )
        path = files[0]
    if not path.exists():
        raise FileNotFoundError(f"{path}: expected a .safetensors file, an index of shards or a folder, found none")
    if path.suffix != ".json":
        with _safetensors().safe_open(path, framework="pt") as file:
            return dict.fromkeys(file.keys(), path)
    content = json.loads(path.read_text())
    if "weight_map" not in content:
        raise ValueError(f"{path}: expected an index with a weight_map, got {', '.join(content) or 'nothing'}")
    return {name: path.parent / shard for name, shard in content["weight_map"].items()}


def dequantise_blocks(weight: torch.Tensor, scale_inv: torch.Tensor, name: str = "weight") -> torch.Tensor:
    """Undo FP8 block scaling: each block of 128 x 128 times its scale.

    Args:
        weight: (rows, columns) FP8.
        scale_inv: (ceil(rows / 128), ceil(columns / 128)) float; in spite of its name what the block is multiplied by.
        name: of the weight, for messages.

    Returns:
        (rows, columns) fp32.

    Raises:
        ValueError: the shapes do not fit each other.

    Reference: DeepSeek-V3, arXiv 2412.19437, section 3.3.2.
    """
    blocks = tuple(math.ceil(n / FP8_BLOCK) for n in weight.shape)
    if weight.ndim != 2 or tuple(scale_inv.shape) != blocks:
        raise ValueError(
            f"{name}{SCALE}: expected shape {blocks}, a scale for each {FP8_BLOCK} x {FP8_BLOCK} block of a weight of "
            f"shape {tuple(weight.shape)}, got {tuple(scale_inv.shape)}"
        )
    rows, columns = weight.shape
    by_row = scale_inv.float().repeat_interleave(FP8_BLOCK, dim=0)[:rows]
    return weight.float().mul_(by_row.repeat_interleave(FP8_BLOCK, dim=1)[:, :columns])


class AttentionFiles:
    """The tensors of one layer's attention; a context manager, since it keeps files open.

    Args:
        path: as `find_files` takes it.
        layer: its number.

    Raises:
        ValueError: the checkpoint has no such layer.
    """

    def __init__(self, path: str | Path, layer: int):
        found = [(match, file) for name, file in find_files(path).items() if (match := _NAME.search(name))]
        # full name and file by what follows self_attn
        self.files = {m[2]: (m.string, file) for m, file in found if int(m[1]) == layer and m[2] != _IGNORED}
        self._stack, self._handles = ExitStack(), {}
        if not self.files:
            layers = sorted({int(m[1]) for m, _ in found})
            raise ValueError(
                f"{path}: expected tensors named model.layers.{layer}.self_attn.*, got "
                + (f"those of layers {layers[0]} to {layers[-1]}" if layers else "none of any layer's self_attn")
            )

    def __enter__(self) -> "AttentionFiles":
        return self

    def __exit__(self, *exception) -> None:
        self._stack.close()

    def _open(self, key: str):
        name, file = self.files[key]
        if file not in self._handles:
            if not file.exists():
                raise FileNotFoundError(f"{file}: expected the shard that holds {name}, found none")
            handle = self._stack.enter_context(_safetensors().safe_open(file, framework="pt"))
            self._handles[file] = handle, set(handle.keys())
        handle, names = self._handles[file]
        if name not in names:
            raise ValueError(f"{file}: expected it to hold {name}, as the index says, got a file without it")
        return handle, name

    def shape_and_dtype(self, key: str) -> tuple[tuple[int, ...], str]:
        """Of one tensor, from the file's header; the dtype as safetensors calls it."""
        handle, name = self._open(key)
        part = handle.get_slice(name)
        return tuple(part.get_shape()), part.get_dtype()

    def read(self, key: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """One tensor on the CPU, dequantised; as stored if dtype is None, and bf16 where that is FP8."""
        handle, name = self._open(key)
        tensor = handle.get_tensor(name)
        is_fp8, has_scales = tensor.dtype in _FP8, key + SCALE in self.files
        if is_fp8 != has_scales:
            raise ValueError(
                f"{name}{SCALE}: expected it beside weights in FP8 and only there, got "
                f"{'one' if has_scales else 'none'} beside {tensor.dtype}"
            )
        if not is_fp8:
            return tensor.to(dtype or tensor.dtype)
        scale_inv = self._open(key + SCALE)[0].get_tensor(name + SCALE)
        return dequantise_blocks(tensor, scale_inv, name).to(dtype or torch.bfloat16)
