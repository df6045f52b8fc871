"""`autopar audit`: reads other frameworks' configurations as typed jobs, says whether they are legal, fit and are fast,
and writes the better one back."""

from autopar.auditing.result import Audit, audit

__all__ = ["Audit", "audit"]
