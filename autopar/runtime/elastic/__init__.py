"""Training that outlives ranks which are lost for good: the next rung's program is taken, and the state is there.

    after a step    each rank keeps its state in its host's memory, as files, which outlive the process    `snapshots`
                    what one node alone has goes to a rank of another node as well                         `mirrors`
    ranks change    torchrun starts the processes anew, as many as there are; the largest program that     `joining`
                    they are enough for is taken
    then            ranks take from each other what they lack, by the slices of both programs              `reader`

The last step that all kept is the one that is gone on from. Where something of it is lost with all who had it, the last
checkpoint is, and a line says so.
"""

from autopar.runtime.elastic.training import Elastic

__all__ = ["Elastic"]
