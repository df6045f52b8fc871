"""What things cost on a device: profiles, operator times, collectives, memory; and the measuring of a host.

Times are integer nanoseconds, sizes bytes, shapes those of one rank's slices.
"""

from autopar.cost.collectives import Route as Route
from autopar.cost.collectives import collective_time_ns as collective_time_ns
from autopar.cost.collectives import redistribution as redistribution
from autopar.cost.collectives import step_time_ns as step_time_ns
from autopar.cost.collectives import waits_along as waits_along
from autopar.cost.compute import flops as flops
from autopar.cost.compute import node_time_ns as node_time_ns
from autopar.cost.host import measure_profile as measure_profile
from autopar.cost.library import load_profile as load_profile
from autopar.cost.library import profile_names as profile_names
from autopar.cost.library import profiles_of as profiles_of
from autopar.cost.library import template_profile as template_profile
from autopar.cost.profile import Profile as Profile
from autopar.cost.profile import Runtime as Runtime
