"""Measures a host and writes cost profiles; finds profiles by name: shipped ones, files, this host's own.

`measure.py`, `measure_gloo.py`, `measure_gpu.py` and `measure_links.py` are scripts that need torch only; `host.py`
runs the first two, `fit.py` makes a profile of their points, `published` makes one of tables, as `measure_gpu.py`
writes them, and `linked.py` puts measured links into one.
"""

from autopar.profiler.host import MEASURE_GPU as MEASURE_GPU
from autopar.profiler.host import measure_profile as measure_profile
from autopar.profiler.library import load_profile as load_profile
from autopar.profiler.library import profile_names as profile_names
from autopar.profiler.library import profile_of as profile_of
from autopar.profiler.library import profiles_of as profiles_of
from autopar.profiler.library import template_profile as template_profile
