"""Public configurations of other frameworks, audited, each verdict beside what a hand calculation says."""
