"""What launchers share: facts about the device and the choice of the current one."""

import threading
from contextlib import nullcontext
from functools import lru_cache
from typing import NamedTuple

import torch


class Device(NamedTuple):
    """What the choice of a configuration depends on.

    Args:
        num_sms: streaming multiprocessors.
        shared_bytes: shared memory that a program can have.
        has_tma: whether tiles can be loaded by TMA (Hopper and newer).
        is_hopper: whether its compute capability is 9.0.
    """

    num_sms: int
    shared_bytes: int
    has_tma: bool
    is_hopper: bool = False


_NO_GUARD = nullcontext()
_thread = threading.local()
# What a machine without a GPU pretends to be, so that the same configurations run on its interpreter.
_H200 = Device(num_sms=132, shared_bytes=232_448, has_tma=True, is_hopper=True)


@lru_cache
def device_facts(device: torch.device) -> Device:
    """Facts of a CUDA device; an H200's for the CPU, where kernels run on the interpreter."""
    if device.type != "cuda":
        return _H200
    properties = torch.cuda.get_device_properties(device)
    capability = (properties.major, properties.minor)
    return Device(
        properties.multi_processor_count, properties.shared_memory_per_block_optin, capability >= (9, 0),
        capability == (9, 0),
    )  # fmt: skip


def device_guard(device: torch.device):
    """Context in which `device` is the current one; Triton launches on the current device, not on the tensors'."""
    if device.type != "cuda":
        return _NO_GUARD
    # a CUDA tensor is there, so torch.cuda.current_device() would find CUDA initialised and ask this
    if device.index != torch._C._cuda_getDevice():
        return torch.cuda.device(device)
    if not hasattr(_thread, "has_context"):
        # A new thread has no context until torch launches something there, and allocating from what torch has cached
        # does not; Triton's tensor maps need one.
        torch.cuda.set_device(device)
        _thread.has_context = True
    return _NO_GUARD
