"""All that emitted programs and users of the runtime name, in one place; `autopar.runtime` has it once it is asked."""

from autopar.runtime.allocation import keep_freed_memory
from autopar.runtime.branches import Zeros, owned
from autopar.runtime.building import build
from autopar.runtime.checkpoint import last_checkpoint, load_checkpoint, save_checkpoint
from autopar.runtime.comm import count_bytes
from autopar.runtime.constants import computed_once, folded
from autopar.runtime.copying import copied_out, offloading
from autopar.runtime.declare import (
    Algorithm,
    Block,
    Buffer,
    Fields,
    Given,
    Input,
    Numbered,
    Parameter,
    Parameters,
    Piece,
    Pipeline,
    Program,
    Received,
    Servers,
    Stage,
    renamed,
)
from autopar.runtime.elastic import Elastic
from autopar.runtime.errors import CollectiveError, ProgramError, WorldError
from autopar.runtime.functions import apply, hooked, imported
from autopar.runtime.host_link import LinkRates
from autopar.runtime.inputs import in_first, microbatch, total
from autopar.runtime.lowering.async_linears import *
from autopar.runtime.lowering.caches import *
from autopar.runtime.lowering.context import *
from autopar.runtime.lowering.cross_entropy import *
from autopar.runtime.lowering.dropout import *
from autopar.runtime.lowering.embedding import *
from autopar.runtime.lowering.experts import *
from autopar.runtime.lowering.factors import *
from autopar.runtime.lowering.grouped import *
from autopar.runtime.lowering.heads import *
from autopar.runtime.lowering.in_bits import *
from autopar.runtime.lowering.in_eight_bits import *
from autopar.runtime.lowering.statistics import *
from autopar.runtime.lowering.window import *
from autopar.runtime.lowering.windows import *
from autopar.runtime.lowering.writes import *
from autopar.runtime.made_again import remade, remaking
from autopar.runtime.mesh import Axis, RankMesh, make_rank_mesh
from autopar.runtime.optimizers import declare_optimizer
from autopar.runtime.own_time import OwnTime
from autopar.runtime.placement import local_offset, local_size
from autopar.runtime.randomness import draw, reference_dropout, seed_dropout, set_exact_dropout
from autopar.runtime.rank import Rank
from autopar.runtime.recomputing import recomputed
from autopar.runtime.redistributing import redistribute
from autopar.runtime.servers import is_server, serve
from autopar.runtime.tracing import ran
from autopar.runtime.watch import Watch

__all__ = [
    "Algorithm",
    "Axis",
    "Block",
    "Buffer",
    "CollectiveError",
    "Elastic",
    "Fields",
    "Given",
    "Input",
    "LinkRates",
    "Numbered",
    "OwnTime",
    "Parameter",
    "Parameters",
    "Piece",
    "Pipeline",
    "Program",
    "ProgramError",
    "Rank",
    "RankMesh",
    "Received",
    "Servers",
    "Stage",
    "Watch",
    "WorldError",
    "Zeros",
    "apply",
    "build",
    "computed_once",
    "copied_out",
    "count_bytes",
    "declare_optimizer",
    "draw",
    "folded",
    "hooked",
    "imported",
    "in_first",
    "is_server",
    "keep_freed_memory",
    "last_checkpoint",
    "load_checkpoint",
    "local_offset",
    "local_size",
    "make_rank_mesh",
    "microbatch",
    "offloading",
    "owned",
    "ran",
    "recomputed",
    "redistribute",
    "reference_dropout",
    "remade",
    "remaking",
    "renamed",
    "save_checkpoint",
    "seed_dropout",
    "serve",
    "set_exact_dropout",
    "total",
]
