"""The version of what the planner writes beside a traced program, which its traces have with them."""

FORMAT = 2
