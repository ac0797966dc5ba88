"""What launchers share: facts about the device and the choice of the current one."""

from contextlib import nullcontext

import torch

# SMs of the GPU that a machine without one pretends to be (an H200), so that split counts are the same there.
_SMS_WITHOUT_GPU = 132


def num_sms(device: torch.device) -> int:
    """Streaming multiprocessors of a CUDA device; 132 for the CPU, where kernels run on the interpreter."""
    if device.type != "cuda":
        return _SMS_WITHOUT_GPU
    return torch.cuda.get_device_properties(device).multi_processor_count


def device_guard(device: torch.device):
    """Context in which `device` is the current one; Triton launches on the current device, not on the tensors'."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)
