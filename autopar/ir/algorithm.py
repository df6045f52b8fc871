"""Training algorithms other than synchronous ones, in which copies of the parameters meet in another way.

A plan has an axis of copies where parameters are stored whole and used as they are (I → R), and the batch is split: the
copies of data parallelism. Under an algorithm, the gradients of an axis of copies are not summed over it:

    local_sgd(8)             each copy makes 8 updates of its own, then all take the mean of their parameters
    local_sgd(8, after=100)  the same after 100 updates of summed gradients (post-local SGD)
    adasum                   in each step, gradients of copies are combined by how far they point the same way
    backup(1)                of n copies, the gradients of the first n - 1 that are there make a step's update
    int8                     gradients are summed in 8 bits, and what that leaves out is added in the next step
    topk(0.01)               so are the largest hundredth of the values, and where they are
    powersgd(4)              so are matrices, in rank 4
    pipedream                there are no copies: stages update their weights after each microbatch (`ops.pipedream`)

Those that send fewer bits keep the copies equal (`runtime.compressing`), and so does backup (`runtime.backup`). For
local SGD and Adasum, a copy's own gradient is of its own part of the batch, scaled so that the mean over copies of
equal parameters is the gradient of the whole batch. None computes what one device does: they are taken by name, and no
search chooses one, but for int8 where `allow=("compression",)` says so.

Sources: McMahan et al. 2017 (arXiv:1602.05629) and Stich 2019 (arXiv:1805.09767) for local SGD, Lin et al. 2020
(arXiv:1808.07217) for post-local SGD, Maleki et al. 2021 (arXiv:2006.02924) for Adasum, Chen et al. 2016
(arXiv:1604.00981) for backup workers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from autopar.errors import PlanError

LOCAL_SGD, ADASUM, INT8, TOPK, POWERSGD = "local_sgd", "adasum", "int8", "topk", "powersgd"
PIPEDREAM, BACKUP = "pipedream", "backup"
COMPRESSED = (INT8, TOPK, POWERSGD)
"""Those that send gradients in fewer bits."""
FORMS = (
    'local_sgd(PERIOD), such as "local_sgd(8)" or "local_sgd(8, after=100)", "adasum", backup(LATE), such as '
    '"backup(1)", "int8", topk(SHARE), such as "topk(0.01)", powersgd(RANK), such as "powersgd(4)", or "pipedream"'
)
INT8_ERROR = 0.009
"""Of the norm of a sum: two roundings to 127 levels of a block's largest value, which is 2.83 standard deviations of
256 normally distributed values in the mean: √2 · 2.83 / 127 / √12."""
MOST = 1 << 20  # updates
_LOCAL = re.compile(r"local_sgd\(\s*(\d{1,7})\s*(?:,\s*after\s*=\s*(\d{1,7})\s*)?\)")
_SHARE = re.compile(r"topk\(\s*(0?\.\d{1,9}|\d(?:\.\d+)?e-0?\d)\s*\)")
_RANK = re.compile(r"powersgd\(\s*(\d{1,4})\s*\)")
_LATE = re.compile(r"backup\(\s*(\d{1,4})\s*\)")
_WITH_COPIES = re.compile(r"(?:,\s*|\(\s*)copies\s*=\s*(\d{1,7})\s*\)")


@dataclass(frozen=True)
class Algorithm:
    """name: of the list above, without numbers; axis: the mesh axis of copies, by name, of each stage; period: updates
    between two means of the parameters; after: how many updates are made of summed gradients first. Of COMPRESSED,
    amount: the share of values, or the rank; of backup, the copies whose gradients a step goes without."""

    name: str
    axis: str
    period: int = 1
    after: int = 0
    amount: float = 0

    @property
    def is_compressed(self) -> bool:
        """Whether gradients are summed as ever, in fewer bits."""
        return self.name in COMPRESSED

    def __str__(self) -> str:
        if self.name in (ADASUM, INT8, PIPEDREAM):
            return self.name
        if self.is_compressed or self.name == BACKUP:
            return f"{self.name}({self.amount:.9g})"
        return f"{LOCAL_SGD}({self.period}{f', after={self.after}' if self.after else ''})"


def split_copies(text: object) -> tuple[object, int | None]:
    """What a search is asked for, as "local_sgd(8, copies=4)": the algorithm without the number of copies, and that."""
    found = _WITH_COPIES.search(text) if isinstance(text, str) else None
    if found is None or not isinstance(text, str):
        return text, None
    return text[: found.start()] + (")" if found[0].startswith(",") else ""), int(found[1])


def parse_algorithm(text: object, axis: str) -> Algorithm:
    """An algorithm as a user writes it. Raises PlanError for another text."""
    found = _LOCAL.fullmatch(text.strip()) if isinstance(text, str) else None
    if isinstance(text, str) and text.strip() in (ADASUM, INT8, PIPEDREAM):
        return Algorithm(text.strip(), axis)
    for name, pattern in ((TOPK, _SHARE), (POWERSGD, _RANK), (BACKUP, _LATE)):
        amount = pattern.fullmatch(text.strip()) if isinstance(text, str) else None
        if amount is not None and float(amount[1]) > 0:
            return Algorithm(name, axis, amount=float(amount[1]))
    if found is None or not 1 <= int(found[1]) <= MOST or int(found[2] or 0) > MOST:
        raise PlanError(f"expected algorithm as {FORMS}, with a period from 1 to {MOST:,} updates, found {text!r}")
    return Algorithm(LOCAL_SGD, axis, int(found[1]), int(found[2] or 0))


def algorithm_of_json(data: dict[str, object]) -> Algorithm:
    """The inverse of `algorithm_to_json`, of data that the schema allows."""
    return parse_algorithm(data["text"], str(data["axis"]))


def algorithm_to_json(algorithm: Algorithm) -> dict[str, object]:
    """As plan files have it."""
    return {"text": str(algorithm), "axis": algorithm.axis}
