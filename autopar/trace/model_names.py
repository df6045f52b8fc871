"""Names of a model's parameters, buffers and modules that torch.export cannot write into the source of a graph."""

from __future__ import annotations

import keyword
import re
import unicodedata
from typing import Any

from torch import fx, nn

from autopar.errors import TraceError

_LIFTED = re.compile(r"lifted_tensor_\d+")


def check_names(model: nn.Module) -> None:
    """Raises TraceError for a name that is a keyword, that Python normalises in source, or that ends a string."""
    lifted = [path for path, _ in model.named_modules() if _LIFTED.fullmatch(path.rpartition(".")[2])]
    if lifted:
        raise TraceError(
            f"expected modules of other names than torch.export's own constants, found {lifted[0]!r}; rename it"
        )
    state = (name for pairs in (model.named_parameters, model.named_buffers) for name, _ in pairs())
    for path in (*state, *(path for path, _ in model.named_modules())):
        bad = next((part for part in path.split(".") if not _is_writable(part)), None)
        if bad is not None:
            raise TraceError(
                f"expected names of parameters, buffers and modules that can stand in Python source, found {bad!r} "
                f"in {path!r}, with which torch.export fails; rename it, for example to {_plainer(bad)!r}"
            )


def is_wrapped(model: nn.Module) -> bool:
    """Whether a name of the model's own is one that graphs of torch have: then it is exported as a module's child."""
    graphs = {*dir(fx.GraphModule(nn.Module(), fx.Graph())), "_in_spec", "_out_spec", "_guards_fn"}
    return not graphs.isdisjoint((*model._modules, *model._parameters, *model._buffers))


class Wrapped(nn.Module):
    """A model as a module's child."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)


def _is_writable(part: str) -> bool:
    if part.isidentifier():
        return not keyword.iskeyword(part) and unicodedata.normalize("NFKC", part) == part
    return part.isprintable() and not set(part) & set('"\\')


def _plainer(part: str) -> str:
    plain = "".join(c if f"_{c}".isidentifier() else "_" for c in unicodedata.normalize("NFKC", part))
    return f"{plain}_" if keyword.iskeyword(plain) else plain
