"""Models of Hugging Face transformers that decode from a latent cache; `mla.patch_model` is the entry."""

# before transformers, which imports triton: without a GPU the interpreter must be chosen first
import mla.kernels  # noqa: F401
