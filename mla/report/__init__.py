"""Figures, tables and claims from the measured data; needs neither torch nor triton. Run as `python -m mla.report`."""
