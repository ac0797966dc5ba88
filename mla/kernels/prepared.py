"""Launching a compiled kernel again without Triton's Python around it.

Triton's launcher looks at every argument and fills a tensor map for every descriptor, at every call. Here the caller
keeps the tensor maps.

This is the only file that uses private parts of Triton, so it serves only the versions it was tested with; with others,
`can_prepare` is False and kernels are launched in the public way.
"""

import torch
import triton

_TESTED_VERSIONS = ("3.6.0",)


def can_prepare() -> bool:
    return triton.__version__ in _TESTED_VERSIONS


class PreparedLaunch:
    """One compiled kernel on one grid.

    Args:
        compiled: what `kernel[grid](...)` returned. Its specialisation must hold for all later arguments.
        grid: two sizes.
        constants: the values of the kernel's constexpr arguments, which come last.
        device: index of the GPU.
    """

    def __init__(self, compiled, grid: tuple[int, int], constants: tuple, device: int):
        launcher = compiled.run
        self._launch = launcher.launch
        if compiled.metadata.tensordesc_meta:
            # the compiled launcher is inside a function of Triton's that turns descriptors into tensor maps
            (self._launch,) = (
                c.cell_contents for c in self._launch.__closure__ if hasattr(c.cell_contents, "__self__")
            )
        self._before_stream = (*grid, 1)
        self._after_stream = (
            compiled.function, launcher.launch_cooperative_grid, launcher.launch_pdl, None, None,
            compiled.packed_metadata, None, None, None,
        )  # fmt: skip
        self._constants = constants
        self._device = device
        self._metadata = compiled.metadata.tensordesc_meta

    def tensor_map(self, index: int, address: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple:
        """The launcher's arguments for descriptor number `index`: a tensor map, and shape and strides again."""
        from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

        meta = self._metadata[index]
        tensor_map = triton.runtime.driver.active.utils.fill_tma_descriptor(
            address, meta["swizzle"], meta["elem_size"], TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]],
            meta["block_size"], list(shape), list(strides), 0,
        )  # fmt: skip
        return (tensor_map, *shape, *strides)

    def __call__(self, maps: tuple, arguments: tuple) -> None:
        """Launch on the current stream of the device, which must be the current one.

        Args:
            maps: `tensor_map` of each descriptor, joined.
            arguments: the remaining ones; addresses for pointers.
        """
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        self._launch(*self._before_stream, stream, *self._after_stream, *maps, *arguments, *self._constants)
