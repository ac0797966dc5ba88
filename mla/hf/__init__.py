"""Hugging Face transformers: models of the DeepSeek family that decode through `mla.mla_decode`."""
