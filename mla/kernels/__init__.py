"""Kernels. Without a GPU they run on Triton's interpreter, on CPU tensors.

Triton decides when a kernel is decorated, and decorates its own library when it is imported, so the switch must be
set before the first import of triton.
"""

import os
import sys

import torch

if not torch.cuda.is_available() and "TRITON_INTERPRET" not in os.environ:
    if "triton" in sys.modules:
        raise RuntimeError(
            "mla.kernels: expected to be imported before triton, since this machine has no GPU and Triton's "
            "interpreter must be chosen first; got triton imported already. Import mla.kernels earlier, or set "
            "TRITON_INTERPRET=1 (0 to compile without running)."
        )
    os.environ["TRITON_INTERPRET"] = "1"

from triton import knobs

# Kernels are decorated when their modules are imported, so this cannot change later.
ON_INTERPRETER: bool = knobs.runtime.interpret
