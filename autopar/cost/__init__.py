"""What things cost on a device: profiles, operator times, collectives, memory.

Times are integer nanoseconds, sizes bytes, shapes those of one rank's slices.
"""

from autopar.cost.collectives import Route as Route
from autopar.cost.collectives import beside_compute_ns as beside_compute_ns
from autopar.cost.collectives import collective_time_ns as collective_time_ns
from autopar.cost.collectives import redistribution as redistribution
from autopar.cost.collectives import step_time_ns as step_time_ns
from autopar.cost.collectives import waits_along as waits_along
from autopar.cost.compute import flops as flops
from autopar.cost.compute import node_time_ns as node_time_ns
from autopar.cost.profile import Profile as Profile
from autopar.cost.profile import Runtime as Runtime
