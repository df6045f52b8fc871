"""What a profiler saw of a program's run, beside what was simulated; and what a profile learns from it."""
