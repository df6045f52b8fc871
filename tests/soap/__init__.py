"""The SOAP search: its space, its chain, its report."""
