"""What is decided of a plan before its placements, and how reports call it."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.mesh import LogicalMesh, make_axes
from autopar.ir.schedule import PLAIN


@dataclass(frozen=True)
class Outline:
    """Submeshes and their logical meshes, microbatches; of several stages, the layers of each, and the schedule.

    submeshes: the logical mesh of each. stage_of: of each layer. first_ranks: of each stage; stages that begin at the
    same rank are chunks of one submesh. Both may be left open.
    """

    submeshes: tuple[LogicalMesh, ...]
    microbatches: int = 1
    stage_of: tuple[int, ...] = ()
    first_ranks: tuple[int, ...] = ()
    schedule: str = PLAIN

    @property
    def axes(self) -> LogicalMesh:
        """The logical mesh of the first submesh, which is that of all where they are alike."""
        return self.submeshes[0]

    @property
    def is_alike(self) -> bool:
        """Whether all submeshes are seen as logical meshes of the same sizes."""
        return len({sizes_text(axes) for axes in self.submeshes}) == 1

    @property
    def num_submeshes(self) -> int:
        """Of how many submeshes it is; the devices work as one where it is one."""
        return len(self.submeshes)

    @property
    def setting(self) -> Outline:
        """What it has in common with those that have as many alike submeshes and microbatches."""
        sizes = tuple(axis.size for axis in self.axes)
        names = tuple(f"d{number}" for number in range(len(sizes)))
        return Outline((make_axes(names, sizes),) * self.num_submeshes, self.microbatches)

    def __str__(self) -> str:
        sizes, count = sizes_text(self.axes), self.num_submeshes
        text = f"mesh {sizes}" if count == 1 else f"{count} stages of {sizes}"
        if self.stage_of:
            layers = "+".join(str(self.stage_of.count(stage)) for stage in sorted(set(self.stage_of)))
            text = f"{len(self.first_ranks)} stages of {sizes}, {self.schedule}, layers {layers}"
        return text if self.microbatches == 1 else f"{text} in {self.microbatches} microbatches"


def sizes_text(axes: LogicalMesh) -> str:
    """ "2x4", or "1" without axes: how reports call a logical mesh."""
    return "x".join(str(axis.size) for axis in axes) or "1"
