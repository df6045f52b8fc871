"""Plays a plan on the streams of its devices: step time, what is exposed, bytes sent, memory over time."""

from autopar.simulate.alone import prices_of as prices_of
from autopar.simulate.incremental import Incremental as Incremental
from autopar.simulate.incremental import simulate as simulate
from autopar.simulate.overlap import Overlap as Overlap
from autopar.simulate.overlap import Sums as Sums
from autopar.simulate.timeline import Timeline as Timeline
from autopar.simulate.timeline import predict as predict
from autopar.simulate.traffic import traffic as traffic
from autopar.simulate.traffic import traffic_by_submesh as traffic_by_submesh
